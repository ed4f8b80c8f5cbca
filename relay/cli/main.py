"""The command line of the relay: which commands there are, and where each is.

A command is loaded when it is used: the libraries of all of them take long to load. Must not contain what
a command does.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from schemas.process.cli_manual import Manual, program


class _Commands(Manual):
    on_demand: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "run": "relay.cli.run:app",
            "demo": "relay.cli.demo.command:app",
            "ca": "relay.cli.ca:app",
            "join-token": "relay.cli.join_tokens:app",
            "node": "relay.cli.nodes:app",
            "fleet": "relay.cli.nodes:fleet_app",
            "token": "relay.cli.tokens:app",
            "people": "relay.cli.people:app",
            "audit": "relay.cli.audit:app",
            "kind": "relay.cli.kind:app",
            "state": "relay.cli.state:app",
            "cluster": "relay.cli.cluster:app",
            "config": "relay.cli.run:config_app",
            "service": "relay.cli.service:app",
            "status": "relay.cli.show_status:app",
            "doctor": "relay.cli.doctor:app",
            "connect": "relay.cli.connect:app",
            "headers": "relay.cli.connect:headers_app",
            "stdio": "relay.cli.connect:stdio_app",
            "tools": "relay.cli.remote_tools:tools_app",
            "call": "relay.cli.remote_tools:call_app",
            "login": "relay.cli.remote_tools:login_app",
        }
    )


app = program(
    "relay", "The hub: shows what trusted nodes can do as MCP tools, and routes calls to them.", _Commands
)
