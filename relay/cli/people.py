"""``relay people``: who may sign in, and what they have given to clients.

Must not print the secret of a link anywhere but in the link itself, on standard output.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relay.cli import options
from relay.cli.exits import fail
from relay.cli.options import (
    AsJson,
    PublicUrl,
    StateDir,
    Tenant,
    answer,
    keep_first,
    listing,
    state_files,
    tenant_name,
    utc,
)
from relay.cli.state import authority, path_to_write
from relay.settings.environment import now_ms
from relay.state.grants import Grants
from relay.state.kinds import PERSON
from relay.state.people import (
    INVITATION_MS,
    INVITATION_PATH,
    PeopleError,
    PeopleLedger,
    Person,
    PersonRole,
    can_have_passkeys,
)
from relay.state.tokens import RevokedTokens
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_NO, EXIT_USAGE
from schemas.process.status_socket import NotRunningError, StalledError, read_status
from schemas.text import counted, printable, quoted

if TYPE_CHECKING:
    from schemas.settings import Settings

app = group("The people who may sign in, for their clients.")

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The person's name here, as in `relay people list`.")
]


@app.command("invite", epilog=example("relay people invite ada --role operator"))
def people_invite(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for the person, such as ada.")],
    role: Annotated[
        PersonRole | None,
        typer.Option(
            help="An operator may allow everything; a member, to look at what is not private. Without it: "
            "the role that the person has, or else member."
        ),
    ] = None,
    tenant: Tenant = None,
    public_url: PublicUrl = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Print a one-time link by which a person makes a passkey: a secret for that person.

    The first person turns sign-in on. Who is known already makes one more passkey with it.
    """
    state = state_files(state_dir)
    url, inviting = _url(public_url, state_dir), _inviting(state_dir)
    if (known := inviting.read().named(name)) is not None:
        role, tenant = role or known.role, tenant or known.tenant
    try:
        person, secret = inviting.invite(name, role or PersonRole.MEMBER, tenant_name(tenant, state))
    except PeopleError as error:
        fail(str(error), EXIT_USAGE)
    keep_first(state, public_url=url if public_url else None)
    _show_link(person, secret, url, as_json=as_json)


@app.command("reset", epilog=example("relay people reset ada"))
def people_reset(
    name: _Name, public_url: PublicUrl = None, as_json: AsJson = False, state_dir: StateDir = None
) -> None:
    """End a person's passkeys, of a lost device say, and print a link that makes another.

    What the person has given to clients goes on; `relay people show` lists it.
    """
    url = _url(public_url, state_dir)
    try:
        person, secret = _inviting(state_dir).reset(name)
    except PeopleError as error:
        fail(str(error), EXIT_NO)
    _show_link(person, secret, url, as_json=as_json)


@app.command("list", epilog=example("relay people list"))
def people_list(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show everybody who was invited.

    On a relay without the CA's key: without passkeys, which the relay with it has.
    """
    now, people = now_ms(), _people(state_dir).read().by_id.values()
    issuer, is_known = _issuer(people, state_dir), _signs_in(state_dir)
    listing(
        [
            _facts(person, now, issuer)
            | ({} if is_known else {"passkeys": None, "state": "revoked" if person.revoked else None})
            for person in people
        ],
        ("NAME", "ROLE", "TENANT", "SIGNS IN BY", "STATE"),
        lambda each: (
            each["name"],
            each["role"],
            each["tenant"],
            "-" if each["passkeys"] is None else _proves_by(each),
            each["state"] or "-",
        ),
        as_json=as_json,
    )


@app.command("show", epilog=example("relay people show ada"))
def people_show(name: _Name, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show a person, and what the person lets clients do."""
    now = now_ms()
    person = _named(name, state_dir)
    _must_sign_in(state_dir)
    grants = [
        {
            "id": grant.id,
            "client": grant.client_name,
            "origin": grant.origin or None,
            "agent": grant.sub,
            "tenant": grant.tenant,
            "scopes": list(grant.scopes),
            "kinds": None if grant.kinds is None else list(grant.kinds),
            "until_ms": grant.until_ms,
            "asks_again": not grant.remember,
        }
        for grant in _grants(state_dir).read().live_of(person.id, now)
    ]
    facts = _facts(person, now, _issuer([person], state_dir))
    if as_json:
        answer({**facts, "grants": grants}, as_json=True)
        return
    typer.echo(
        f"{person.name}: {facts['role']} of tenant {facts['tenant']}, {facts['state']}, "
        f"signs in by {_proves_by(facts)}"
    )
    listing(
        grants,
        ("GRANT", "CLIENT", "FROM", "AGENT", "SCOPES", "UNTIL (UTC)"),
        lambda each: (
            each["id"],
            printable(each["client"]),
            each["origin"] or "unverified",
            each["agent"],
            " ".join(each["scopes"]),
            utc(each["until_ms"]),
        ),
        as_json=False,
    )


@app.command("revoke", epilog=example("relay people revoke ada"))
def people_revoke(
    name: _Name,
    grant: Annotated[
        str | None, typer.Option("--grant", metavar="ID", help="End this alone, which a client was given.")
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Revoke a person: passkeys, sessions, and all that clients were given end within a second.

    In a cluster a person can be revoked on any machine.
    """
    person, people = _named(name, state_dir), _people(state_dir)
    if grant is not None:
        _must_sign_in(state_dir)
    else:
        # First: whatever is refreshed from here on is refused, and whatever was before is found below.
        people.revoke(person.name)
    ended = _grants(state_dir).end(
        lambda each: each.person == person.id and (grant is None or each.id == grant)
    )
    if grant is not None and not ended:
        fail(f"{person.name} has no grant {quoted(grant)}: see `relay people show`", EXIT_NO)
    what = f"grant {grant} of {person.name}" if grant is not None else person.name
    facts = {"person": person.name, "grants": [each.id for each in ended]}
    answer(facts, as_json=as_json, note=f"revoked {what}; ended for clients: {counted(len(ended), 'grant')}")


def _url(public_url: str | None, state_dir: Path | None) -> str:
    """Return the relay's URL, at which people sign in; end the command if that is not possible."""
    from relay.settings.table import SIGN_IN  # noqa: PLC0415 - for the commands that invite

    url = options.public_url(public_url, state_files(state_dir))
    if not can_have_passkeys(url):
        fail(
            f"browsers make no passkey for {url}: run the relay with --public-url https://NAME, or on this "
            "machine http://localhost:PORT; `relay token issue` needs neither",
            EXIT_CANNOT_RUN,
        )
    if _settings(state_dir)[SIGN_IN] is False:
        fail("the setting sign_in is false: this relay takes no sign-in", EXIT_CANNOT_RUN)
    return url


def _settings(state_dir: Path | None) -> "Settings":
    from relay.settings.table import RELAY, STATE_DIR  # noqa: PLC0415 - for the commands that need it
    from schemas.settings import read_sources  # noqa: PLC0415 - as above

    flags = {STATE_DIR.name: str(state_files(state_dir).root)}
    return options.settings_for_command(read_sources(RELAY, flags, None, os.environ)).settings


def _issuer(people: Iterable[Person], state_dir: Path | None) -> str | None:
    """Return the provider of the settings, which are read where one of ``people`` signs in at any."""
    from relay.settings.table import OIDC  # noqa: PLC0415 - as above

    if all(person.provider is None for person in people):
        return None
    oidc = _settings(state_dir)[OIDC]
    return None if oidc is None else oidc.issuer


def _show_link(person: Person, secret: str, url: str, *, as_json: bool) -> None:
    link = f"{url}{INVITATION_PATH}#{secret}"
    until = now_ms() + INVITATION_MS
    note = f"For {person.name}, {person.role} of tenant {person.tenant}; good once, until {utc(until)} UTC:"
    facts = {"link": link, "person": person.name, "expires_at_ms": until}
    answer(facts, as_json=as_json, result=link, note=note)


def _facts(person: Person, now: int, issuer: str | None) -> dict[str, Any]:
    return {
        "name": person.name,
        "role": person.role.value,
        "tenant": person.tenant,
        "passkeys": len(person.passkeys),
        "issuer": person.provider[0] if person.provider else None,
        "state": person.state(now, issuer),
    }


def _proves_by(facts: Mapping[str, Any]) -> str:
    return printable(facts["issuer"]) if facts["issuer"] else counted(facts["passkeys"], "passkey")


def _named(name: str, state_dir: Path | None) -> Person:
    person = _people(state_dir).read().named(name)
    if person is None:
        fail(f"there is no {quoted(name)}: see `relay people list`", EXIT_NO)
    return person


def _people(state_dir: Path | None) -> PeopleLedger:
    state = state_files(state_dir)
    if not state.ca.exists():
        fail(
            f"{state.root} is of no relay: name its state with --state-dir, or begin with `relay ca init`",
            EXIT_CANNOT_RUN,
        )
    return PeopleLedger(path_to_write(PERSON, state_dir), now_ms, os.urandom)


def _signs_in(state_dir: Path | None) -> bool:
    """Return whether people sign in by this relay: in a cluster, by the one with the CA's key."""
    return authority(state_dir).can_issue() or state_files(state_dir).token_key.exists()


def _must_sign_in(state_dir: Path | None) -> None:
    """End the command on a relay that has neither passkeys nor what clients were given."""
    if not _signs_in(state_dir):
        fail("people sign in by the relay with the CA's key: give this command there", EXIT_CANNOT_RUN)


def _inviting(state_dir: Path | None) -> PeopleLedger:
    """Return the list of people, for links; end the command if sign-in is not possible."""
    people = _people(state_dir)
    _must_sign_in(state_dir)
    try:
        sealed = read_status(state_files(state_dir).root).get("cluster", {}).get("sealed", True)
    except (NotRunningError, StalledError):
        sealed = True  # what is not running says later what it lacks
    if not sealed:
        fail(
            "relays of this fleet do not seal what they say to each other, so people cannot sign in: "
            "run `relay cluster seal` first",
            EXIT_CANNOT_RUN,
        )
    return people


def _grants(state_dir: Path | None) -> Grants:
    state = state_files(state_dir)
    return Grants(state.grants, RevokedTokens(state.revoked_tokens), now_ms, os.urandom)
