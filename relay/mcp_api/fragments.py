"""Parts of a result whose JSON text need not be encoded anew.

The direct way puts the text into the response as it is. The SDK encodes by itself and takes documents. Both
come from the same part, and only the one that is needed is made. Must not know what the parts are.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from relay.ascii_json import encoded


class Fragment:
    """The value of one member of a result. Both methods return the same value, in two forms.

    Without the metaclass of abstract classes: every member of every result is asked whether it is a fragment,
    and with it the answer takes ten times as long. That both methods are there is checked by the types.
    """

    @abstractmethod
    def text(self) -> str:
        """Return the value as JSON in ASCII."""

    @abstractmethod
    def document(self) -> Any:
        """Return the value as Python has it."""


def with_documents(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``result`` with documents for fragments."""
    return {
        name: value.document() if isinstance(value, Fragment) else value for name, value in result.items()
    }


def text_of(result: Mapping[str, Any]) -> str:
    """Return ``result``, some of whose members may be fragments, as JSON in ASCII."""
    if not any(isinstance(value, Fragment) for value in result.values()):
        return encoded(result)
    members = (
        f"{encoded(name)}:{value.text() if isinstance(value, Fragment) else encoded(value)}"
        for name, value in result.items()
    )
    return "{" + ",".join(members) + "}"
