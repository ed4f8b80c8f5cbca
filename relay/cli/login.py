"""``relay login``: keeps which server `relay tools` and `relay call` use, after it has listed tools there.

Must not print a token, nor take one from the command line.
"""

from pathlib import Path
from typing import Annotated

import typer

from relay.cli import remote_server as remote
from relay.cli.exits import fail
from relay.cli.options import AsJson, answer
from relay.client.connect.profile import Profile
from relay.client.connect.token_files import check_token_file
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_USAGE

app = group("Keep the server that is called.")


@app.command(epilog=example("relay login https://relay.example --token-file agent-token"))
def login(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The MCP server. Not needed by --remove.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"The file of the bearer token, mode 0600. Default: {remote.TOKEN_VARIABLE}, or a question; "
            "it is then kept in a file beside the profile.",
        ),
    ] = None,
    root: remote.Root = None,
    plain: remote.Plain = False,
    remove: Annotated[bool, typer.Option("--remove", help="Forget it, and a token that was kept.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a server and its token for `relay tools` and `relay call`, which then need no option for it.

    Lists the tools first, and keeps nothing if that fails. A later login replaces the server.
    """
    path = remote.profile_path()
    own_token = path.with_name("profile.token")
    if remove:
        path.unlink(missing_ok=True)
        own_token.unlink(missing_ok=True)
        answer({"profile": str(path), "removed": True}, as_json=as_json, result=f"{path} is removed.")
        return
    if url is None:
        fail("the URL is missing: the MCP server, for example https://relay.example", EXIT_USAGE)
    if token_file is None:
        remote.keep_given_token(own_token)
    profile = Profile(
        url=remote.with_path(url),
        token_file=check_token_file(token_file or own_token),
        root=root.absolute() if root is not None else None,
        plain=plain,
    )
    options = remote.RemoteOptions(profile.url, token_file=profile.token_file, root=root, plain=plain)
    listed = remote.run_command(remote.survey(options), as_json=as_json)
    profile.write(path)
    answer(
        {"profile": str(path), "url": profile.url, "tools": len(listed)},
        as_json=as_json,
        result=f"{len(listed)} tools are listed. `relay tools` and `relay call` now use {profile.url}.",
        note=f"{path} is written.",
    )
