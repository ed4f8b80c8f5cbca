"""``people.oidc``: the OpenID Connect provider at which people may sign in, and what its claims let them be.

    ["people.oidc"]
    issuer = "https://id.example"
    client_id = "edge-relay"
    secret_file = "/etc/edge-kubelet/oidc.secret"
    allow = ["groups=hub-operators:operator:*", "groups=kitchen:member:kitchen"]

The first rule of ``allow`` that a person's claims meet decides; claims that meet none give nothing. Read only
where it is set. Must not ask the provider anything.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.settings.config import is_trustworthy
from relay.state.people import ALL_TENANTS, PersonRole
from schemas.error_roots import OperatorError
from schemas.files import read_named_private
from schemas.identity import TENANT_PATTERN
from schemas.settings import parse_path
from schemas.text import none_of, quoted
from schemas.times import DurationError, duration_between

MAX_RULES, MAX_SCOPES = 64, 16
_MAX_TEXT, _MAX_SECRET = 256, 4096
_RULE = "CLAIM=VALUE:ROLE:TENANT, such as groups=hub-operators:operator:*"
_SCOPE = re.compile(r"[\x21\x23-\x5B\x5D-\x7E]{1,64}")
_ALWAYS = ("openid", "profile", "email")
_duration = duration_between("1h", "90d")


@dataclass(frozen=True, slots=True)
class ClaimRule:
    """A claim that is ``value``, or a list that has it, makes a person ``role`` of ``tenant``."""

    claim: str
    value: str
    role: PersonRole
    tenant: str

    def is_met(self, claims: Mapping[str, Any]) -> bool:
        found = claims.get(self.claim)
        if self.claim == "email" and claims.get("email_verified") is not True:
            return False  # at many providers people type their address themselves
        return found == self.value or (isinstance(found, list) and self.value in found)


@dataclass(frozen=True, slots=True)
class OpenidConfig:
    """The provider, as the operator has named it.

    Attributes:
        issuer: letter by letter as in the provider's metadata and tokens.
        secret_file: holds the secret of the client ``client_id``; mode 0600.
        rules: of which the first that is met decides.
        name_claim: by which people are listed; it decides nothing.
        scopes: what the relay asks for.
        max_lifetime_ms: how long what a person gives to a client lasts at most.
    """

    issuer: str
    client_id: str
    secret_file: Path
    rules: tuple[ClaimRule, ...]
    name_claim: str = "preferred_username"
    scopes: tuple[str, ...] = _ALWAYS
    max_lifetime_ms: int = _duration("90d")

    def secret(self) -> str:
        """Return the client's secret.

        Raises:
            OSError, UnicodeDecodeError: it cannot be read, or others can read it.
        """
        return read_named_private(self.secret_file, _MAX_SECRET).decode("utf-8").strip()

    def allowed(self, claims: Mapping[str, Any]) -> tuple[PersonRole, str] | None:
        """Return the role and the tenant of a person with these claims; None: no sign-in."""
        return next(((rule.role, rule.tenant) for rule in self.rules if rule.is_met(claims)), None)


def openid_config(text: str) -> OpenidConfig | None:
    """Return the table whose members ``text`` has as JSON; None if there are none.

    Raises:
        OperatorError: it cannot be used; the text is what to do.
    """
    members: dict[str, Any] = json.loads(text)
    if not members:
        return None
    for name in members:
        if name not in _MEMBERS:
            raise OperatorError(none_of(name, _MEMBERS))
    if missing := [name for name in _NEEDED if name not in members]:
        raise OperatorError(f"has no {missing[0]}")
    read = {name: _MEMBERS[name](name, value) for name, value in members.items()}
    return OpenidConfig(**{_FIELDS.get(name, name): value for name, value in read.items()})


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise OperatorError(f"has a {name} that is not 1 to {_MAX_TEXT} printable characters in quotes")
    return value


def _issuer(name: str, value: object) -> str:
    url = _text(name, value)
    if not is_trustworthy(url) or "?" in url:
        # Not repeated: what is wrong with it may be the password in it.
        raise OperatorError(f"has an {name} that is no https URL, without credentials and query")
    return url


def _file(name: str, value: object) -> Path:
    return parse_path(_text(name, value))


def _list(name: str, value: object, most: int) -> Sequence[str]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise OperatorError(f'{name} is an array of 1 to {most} texts: ["…", "…"]')
    return [_text(name, each) for each in value]


def _scopes(name: str, value: object) -> tuple[str, ...]:
    scopes = _list(name, value, MAX_SCOPES)
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            raise OperatorError(f"{name} has {quoted(scope)}, which is no scope")
    return tuple(dict.fromkeys((*_ALWAYS, *scopes)))


def _lifetime(name: str, value: object) -> int:
    try:
        return _duration(_text(name, value))
    except DurationError as error:
        raise OperatorError(f"{name}: {error}") from None


def _rules(name: str, value: object) -> tuple[ClaimRule, ...]:
    rules = tuple(map(_rule, _list(name, value, MAX_RULES)))
    if len({(rule.claim, rule.value) for rule in rules}) < len(rules):
        raise OperatorError(f"{name} has two rules for one value of a claim: the first would decide")
    return rules


def _rule(text: str) -> ClaimRule:
    claim, _, rest = text.partition("=")
    value, *more = rest.rsplit(":", 2)
    if not claim or not value or len(more) != 2:  # noqa: PLR2004 - role and tenant
        raise OperatorError(f"allow has {quoted(text)}, which is not {_RULE}")
    role, tenant = more
    if role not in {each.value for each in PersonRole}:
        raise OperatorError(f"allow: {none_of(role, [each.value for each in PersonRole])}")
    of_all = (role, tenant) == (PersonRole.OPERATOR.value, ALL_TENANTS)
    if not of_all and not re.fullmatch(TENANT_PATTERN, tenant):
        raise OperatorError(
            f"allow: {quoted(tenant)} is no tenant: lower-case letters, digits, _ and -; "
            "* for an operator of all"
        )
    return ClaimRule(claim, value, PersonRole(role), tenant)


_FIELDS = {"allow": "rules", "max_lifetime": "max_lifetime_ms"}
_NEEDED = ("issuer", "client_id", "secret_file", "allow")
_MEMBERS: Mapping[str, Callable[[str, object], Any]] = {
    "issuer": _issuer,
    "client_id": _text,
    "secret_file": _file,
    "allow": _rules,
    "name_claim": _text,
    "scopes": _scopes,
    "max_lifetime": _lifetime,
}
