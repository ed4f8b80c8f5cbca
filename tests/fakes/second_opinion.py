"""The other implementation of JSON Schema, over the same documents."""

from typing import Any

import jsonschema
import referencing
from referencing.jsonschema import DRAFT202012

from schemas.registry import SCHEME, SchemaRegistry


def second_opinion(registry: SchemaRegistry, ref: str) -> jsonschema.Draft202012Validator:
    """Return the document ``ref`` as ``jsonschema`` reads it."""
    resources = [
        (SCHEME + other, DRAFT202012.create_resource(registry.document(other)))
        for other in registry.documents
    ]
    known: Any = referencing.Registry().with_resources(resources)
    return jsonschema.Draft202012Validator(registry.document(ref), registry=known)
