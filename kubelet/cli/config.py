"""``kubelet config``: what the daemon would run with, by the loader of ``kubelet run``.

Must not change anything.
"""

import json

import typer

from kubelet.cli.manual import example, group
from kubelet.cli.options import AsJson, usual_state_dir
from kubelet.cli.settings_options import takes_settings
from kubelet.process import EXIT_CONFIG
from kubelet.settings import KUBELET, load_settings
from schemas.error_roots import ConfigError
from schemas.settings_report import as_document, as_toml
from schemas.settings_sources import Sources

app = group("The settings that the daemon runs with.")


@app.command("check", epilog=example("kubelet config check --config ./kubelet.toml"))
@takes_settings(KUBELET)
def config_check(sources: Sources, as_json: AsJson = False) -> None:
    """Check the settings as `kubelet run` would read them. Exit 78 if they cannot be used."""
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


@app.command("show", epilog=example("kubelet config show"))
@takes_settings(KUBELET)
def config_show(sources: Sources, as_json: AsJson = False) -> None:
    """Show each setting as a line of the file, and where its value comes from."""
    settings = load_settings(sources, usual_state_dir()).settings
    if as_json:
        typer.echo(json.dumps(as_document(settings)))
        return
    for line in as_toml(settings):
        typer.echo(line)
