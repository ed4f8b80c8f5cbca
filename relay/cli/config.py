"""``relay config``: what the relay would run with, by the loader of ``relay run``.

Must not change anything.
"""

import json

import typer

from relay.cli.exits import EXIT_CONFIG
from relay.cli.manual import example, group
from relay.cli.options import AsJson, usual_state_dir
from relay.cli.settings_options import takes_settings
from relay.settings import RELAY, load_settings
from schemas.error_roots import ConfigError
from schemas.settings_report import as_document, as_toml
from schemas.settings_sources import Sources

app = group("The settings that the relay runs with.")


@app.command("check", epilog=example("relay config check --config ./relay.toml"))
@takes_settings(RELAY)
def config_check(sources: Sources, as_json: AsJson = False) -> None:
    """Check the settings as `relay run` would read them. Exit 78 if they cannot be used."""
    from schemas.contract import read_contract  # noqa: PLC0415 - the validator, for this command alone

    problems: tuple[str, ...] = ()
    try:
        read_contract(load_settings(sources, usual_state_dir()).config().kinds)
    except ConfigError as error:
        problems = error.problems
    file = None if sources.file is None else str(sources.file)
    if as_json:
        typer.echo(json.dumps({"valid": not problems, "file": file, "problems": problems}))
    else:
        for problem in problems:
            typer.echo(problem, err=True)
        if not problems:
            typer.echo(f"valid: {file or 'no file, the environment and the options'}")
    if problems:
        raise SystemExit(EXIT_CONFIG)


@app.command("show", epilog=example("relay config show"))
@takes_settings(RELAY)
def config_show(sources: Sources, as_json: AsJson = False) -> None:
    """Show each setting as a line of the file, and where its value comes from."""
    settings = load_settings(sources, usual_state_dir()).settings
    if as_json:
        typer.echo(json.dumps(as_document(settings)))
        return
    for line in as_toml(settings):
        typer.echo(line)
