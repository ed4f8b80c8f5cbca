import pytest

from relay.fleet.tool_schemas import ToolSchemas
from schemas.registry import SchemaRegistry, listed_schema

INPUT, OUTPUT = "system.echo.invoke.input@1.0.0", "system.echo.invoke.output@1.0.0"


def test_a_tool_has_its_documents_compiled_and_as_they_are_listed(registry: SchemaRegistry) -> None:
    schemas = ToolSchemas.of(registry, INPUT, OUTPUT)
    assert schemas.arguments is registry.load(INPUT)
    assert schemas.result is registry.load(OUTPUT)
    assert schemas.input_schema == listed_schema(registry, INPUT)
    assert schemas.output_schema == listed_schema(registry, OUTPUT)


@pytest.mark.parametrize("ref", [INPUT, OUTPUT, "error@1.0.0"])
def test_a_listed_schema_is_the_document_without_what_names_it(registry: SchemaRegistry, ref: str) -> None:
    listed, document = listed_schema(registry, ref), registry.document(ref)
    assert not {"$id", "$schema"} & listed.keys()
    assert listed.keys() | {"$id", "$schema"} >= document.keys()


def test_a_document_that_there_is_not_has_no_schema(registry: SchemaRegistry) -> None:
    with pytest.raises(KeyError):
        ToolSchemas.of(registry, INPUT, "none@1.0.0")
