"""The other implementation of JSON Schema, over the same documents."""

from functools import cache
from typing import Any

import jsonschema
import referencing
from referencing.jsonschema import DRAFT202012

from schemas.registry import SCHEME, SchemaRegistry


@cache
def second_opinion(registry: SchemaRegistry, ref: str) -> jsonschema.Draft202012Validator:
    """Return the document ``ref`` as ``jsonschema`` reads it."""
    return jsonschema.Draft202012Validator(registry.document(ref), registry=_resources(registry))


@cache
def _resources(registry: SchemaRegistry) -> Any:
    resources = [
        (SCHEME + ref, DRAFT202012.create_resource(registry.document(ref))) for ref in registry.documents
    ]
    return referencing.Registry().with_resources(resources)
