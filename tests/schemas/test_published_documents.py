"""What was published under a reference stays as it is: nodes, relays and caches keep it by that reference."""

from schemas.registry import SchemaRegistry
from tests.house.published import digests, listed, published, version


def test_no_published_document_was_changed_or_removed(registry: SchemaRegistry) -> None:
    present = digests(registry.documents)
    changed = [ref for ref, digest in published().items() if present.get(ref) != digest]
    assert changed == [], "make a new version of the document instead"


def test_the_list_is_complete_for_the_version_of_the_tree() -> None:
    # A release that has forgotten it: python -P -m tests.house.published
    assert version() in listed()
    assert len(published()) >= 75
