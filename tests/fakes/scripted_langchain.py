"""A chat model of langchain-core that says what a test has written for it.

A test imports this where it needs it: the library takes seconds to import.
"""

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class ScriptedChat(BaseChatModel):
    """Calls one tool with each of ``script`` in turn, then ends."""

    tool: str
    script: list[dict[str, Any]]
    seen: list[BaseMessage] = []  # noqa: RUF012 - a field of pydantic's, copied for each model

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> "ScriptedChat":
        assert [tool.name for tool in tools] == [self.tool]
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **_: Any,
    ) -> ChatResult:
        assert (stop, run_manager is None) == (None, False)
        self.seen[:] = messages
        calls = [{"name": self.tool, "args": self.script.pop(0), "id": "1"}] if self.script else []
        message = AIMessage("" if calls else "It answers.", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def returned(self) -> list[ToolMessage]:
        """Return what its calls ended with."""
        return [message for message in self.seen if isinstance(message, ToolMessage)]
