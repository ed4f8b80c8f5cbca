import json
from pathlib import Path
from typing import Any

import pytest

from schemas.document_store import SCHEME, DocumentStore, referred
from tests.fakes.documents import document_file

REF = "a@1.0.0"


def number(ref: str = REF, **rules: object) -> dict[str, object]:
    return {"$id": SCHEME + ref, "type": "number", **rules}


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({}, id="no-id"),
        pytest.param({"$id": REF}, id="an-id-without-our-scheme"),
        pytest.param({"$id": f"https://a.example/{REF}"}, id="an-id-of-another-scheme"),
        pytest.param({"$id": SCHEME + "b@1.0.0"}, id="the-id-of-another-document"),
        pytest.param({"$id": 1}, id="an-id-that-is-no-text"),
        pytest.param([], id="not-an-object"),
        pytest.param("{", id="not-json"),
    ],
)
def test_a_bad_document_is_refused_and_the_others_are_not(tmp_path: Path, document: object) -> None:
    document_file(tmp_path, f"{REF}.json", document)
    document_file(tmp_path, "good@1.0.0.json", number("good@1.0.0"))
    documents = DocumentStore([tmp_path], {})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\$id must be mcp://schemas/a@1\.0\.0|Expecting"):
            documents[REF]
    assert json.loads(documents["good@1.0.0"]) == number("good@1.0.0")


@pytest.mark.parametrize(
    "target",
    [SCHEME + "b@1.0.0", SCHEME + "b@1.0.0#/$defs/x", "b@1.0.0", REF, "https://a.example/b"],
)
def test_a_reference_to_what_is_no_document_here_is_refused(tmp_path: Path, target: str) -> None:
    document_file(tmp_path, f"{REF}.json", number(items={"$ref": target}))
    with pytest.raises(ValueError, match=r"a@1\.0\.0\.json: refers to .*, which is no document here"):
        DocumentStore([tmp_path], {})[REF]


def test_other_files_in_the_directory_are_no_documents(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", number())
    document_file(tmp_path, "README.md", "not a document")
    documents = DocumentStore([tmp_path], {})
    assert (list(documents), len(documents)) == ([REF], 1)
    with pytest.raises(KeyError):
        documents["README.md"]


def test_a_document_is_given_in_its_canonical_bytes_each_time(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", json.dumps(dict(reversed(number().items())), indent=8))
    documents = DocumentStore([tmp_path], {})
    canonical = b'{"$id":"mcp://schemas/a@1.0.0","type":"number"}'
    assert [documents[REF], documents[REF]] == [canonical, canonical]


def test_what_changes_below_a_running_process_is_not_seen(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", number(maximum=1))
    documents = DocumentStore([tmp_path], {})
    document_file(tmp_path, f"{REF}.json", number(maximum=2))
    assert json.loads(documents[REF])["maximum"] == 1


def test_what_is_brought_is_a_document_like_those_of_the_directory(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", number())
    brought = number("b@1.0.0", items={"$ref": SCHEME + REF})
    documents = DocumentStore([tmp_path], {"b@1.0.0": brought, "bad@1.0.0": number("b@1.0.0")})
    assert json.loads(documents["b@1.0.0"]) == brought
    with pytest.raises(ValueError, match=r"its \$id must be"):
        documents["bad@1.0.0"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param({}, set(), id="nothing"),
        pytest.param({"items": {"$ref": "#/$defs/x"}}, {REF}, id="itself"),
        pytest.param(
            {"allOf": [{"$ref": SCHEME + "b@1.0.0#/x"}, {"not": {"$dynamicRef": SCHEME + "c@1.0.0"}}]},
            {"b@1.0.0", "c@1.0.0"},
            id="others",
        ),
        pytest.param({"properties": {"$ref": {"type": "string"}}}, set(), id="a-property-of-that-name"),
    ],
)
def test_what_a_document_refers_to(rules: dict[str, Any], expected: set[str]) -> None:
    assert referred(REF, number(**rules)) == expected
