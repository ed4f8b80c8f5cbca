"""A model of pydantic-ai that says what a test has written for it.

A test imports this where it needs it: the library takes seconds to import.
"""

from collections.abc import Sequence
from typing import Any

from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel


class Scripted:
    """Calls ``tool`` with each of ``script`` in turn, then ends.

    Attributes:
        model: as the framework has it.
    """

    def __init__(self, tool: str, script: Sequence[dict[str, Any]]) -> None:
        self.model = FunctionModel(self._answer)
        self._tool = tool
        self._script = list(script)
        self._seen: list[ModelMessage] = []

    def returned(self) -> list[ToolReturnPart]:
        """Return what its calls ended with."""
        parts = (part for message in self._seen for part in message.parts)
        return [part for part in parts if isinstance(part, ToolReturnPart)]

    def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self._seen[:] = messages
        assert [tool.name for tool in info.function_tools] == [self._tool]
        if self._script:
            return ModelResponse(parts=[ToolCallPart(self._tool, self._script.pop(0))])
        return ModelResponse(parts=[TextPart("It answers.")])
