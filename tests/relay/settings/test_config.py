from pathlib import Path

import pytest

from relay.settings.config import (
    DEFAULT_LISTEN,
    DEFAULT_PUBLIC_URL,
    ExternalIssuerConfig,
    RelayConfig,
    StateFiles,
    TlsFiles,
    own_state_dir,
)
from schemas.addresses import (
    PLAIN_OPTION,
    AddressError,
    BrokerAddress,
    HostPort,
    is_loopback,
    normal_url,
    parse_host_port,
)


def test_all_state_lies_below_one_directory() -> None:
    root = Path("/var/lib/edge-relay")
    files = vars(StateFiles(root))
    paths = [path for path in files.values() if isinstance(path, Path) and path != root]
    assert {path.parent for path in paths} == {root}
    pairs = {name: pair for name, pair in files.items() if isinstance(pair, TlsFiles)}
    of_pairs = [path for pair in pairs.values() for path in (pair.certificate, pair.key)]
    assert {path.parent for path in of_pairs} == {root / "tls", root / "broker"}
    assert len({*paths, *of_pairs}) == len(files) - 1 + len(pairs)


def test_a_users_own_state_lies_in_the_home() -> None:
    assert own_state_dir(Path("/home/someone")) == Path("/home/someone/.local/state/edge-relay")
    assert own_state_dir(None) is None


def test_by_default_only_this_machine_can_reach_the_relay() -> None:
    address = parse_host_port(DEFAULT_LISTEN)
    assert is_loopback(address.host)
    assert normal_url(DEFAULT_PUBLIC_URL) == DEFAULT_PUBLIC_URL == f"http://{address}"


# --- what travels in the clear ------------------------------------------------------------------------

LOCAL, OPEN = HostPort("127.0.0.1", 8700), HostPort("0.0.0.0", 8700)  # noqa: S104 - what is refused
NEAR, FAR = BrokerAddress("127.0.0.1", 1883), BrokerAddress("mqtt.example", 1883)
TLS = TlsFiles(Path("relay.pem"), Path("relay.key"))
HTTP, HTTPS = "http://127.0.0.1:8700", "https://relay.example"
STATE = StateFiles(Path("/var/lib/edge-relay"))


@pytest.mark.parametrize(
    ("broker", "url", "listen", "tls"),
    [
        pytest.param(NEAR, HTTP, LOCAL, None, id="all on this machine"),
        pytest.param(NEAR, HTTPS, LOCAL, None, id="a proxy in front"),
        pytest.param(NEAR, HTTPS, OPEN, TLS, id="TLS to all"),
        pytest.param(BrokerAddress("mqtt.example", 8883, tls=True), HTTPS, OPEN, TLS, id="TLS everywhere"),
    ],
)
def test_what_others_cannot_read_is_taken(
    broker: BrokerAddress, url: str, listen: HostPort, tls: TlsFiles | None
) -> None:
    assert RelayConfig(broker, url, listen, STATE, tls=tls).tls is tls


@pytest.mark.parametrize(
    ("broker", "url", "listen"),
    [
        pytest.param(NEAR, HTTPS, OPEN, id="served in the clear"),
        pytest.param(FAR, HTTPS, LOCAL, id="a broker in the clear"),
        pytest.param(NEAR, "http://relay.example", LOCAL, id="a URL in the clear"),
    ],
)
def test_what_others_could_read_is_refused_unless_the_operator_says_so(
    broker: BrokerAddress, url: str, listen: HostPort
) -> None:
    with pytest.raises(AddressError, match=PLAIN_OPTION):
        RelayConfig(broker, url, listen, STATE)
    assert RelayConfig(broker, url, listen, STATE, plain_allowed=True).listen is listen


def test_who_serves_over_tls_says_so_in_the_url() -> None:
    with pytest.raises(AddressError, match="--public-url is https"):
        RelayConfig(NEAR, HTTP, LOCAL, STATE, tls=TLS, plain_allowed=True)


def test_what_the_relay_serves_has_a_port_of_its_own_each() -> None:
    with pytest.raises(AddressError, match="metrics_listen and listen are both"):
        RelayConfig(NEAR, HTTP, LOCAL, STATE, metrics_listen=LOCAL)
    with pytest.raises(AddressError, match="broker_listen and listen are both"):
        RelayConfig(NEAR, HTTP, LOCAL, STATE, own_broker=BrokerAddress(LOCAL.host, LOCAL.port))


# --- an outside issuer --------------------------------------------------------------------------------

ISSUER = "https://issuer.example/"
RELAY = "https://relay.example"


@pytest.mark.parametrize(
    "url",
    [
        "https://issuer.example",
        "https://issuer.example:8443/realms/edge/certs?v=1",
        "https://[2001:db8::1]/keys",
        "http://127.0.0.1:9000/keys",
        "http://localhost/keys",
        "http://[::1]:9000/keys",
    ],
)
def test_an_issuer_that_cannot_be_impersonated_is_taken_to_the_letter(url: str) -> None:
    assert ExternalIssuerConfig.parse(ISSUER, url, RELAY) == ExternalIssuerConfig(ISSUER, url)
    assert ExternalIssuerConfig.parse(url, ISSUER, RELAY) == ExternalIssuerConfig(url, ISSUER)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "issuer.example",
        "https://",
        "https:///keys",
        "http://issuer.example/keys",
        "http://localhost.evil.example/keys",
        "http://127.0.0.1@evil.example/keys",
        "http://127.0.0.1\\@evil.example/keys",
        "https://user:secret@issuer.example/keys",
        "file:///etc/keys",
        "file://localhost/etc/keys",
        "ftp://127.0.0.1/keys",
        "unix://localhost/keys",
        "data:application/json,{}",
        "https://issuer.example/keys#1",
        "https://issuer.example/a b",
        'https://issuer.example/"',
        "https://issuer.example/\x1b[31m",
        "https://issuer.example/\n",
        "https://isser.ex\xe4mple",
        "https://issuer.example:port/",
        "https://issuer.example:99999/",
        "https://[::1/",
        "https://issuer.example/" + "x" * 256,
    ],
)
def test_an_issuer_that_could_be_impersonated_is_refused_and_the_url_is_not_repeated(url: str) -> None:
    with pytest.raises(AddressError, match="--jwks must be an https URL") as caught:
        ExternalIssuerConfig.parse(ISSUER, url, RELAY)
    assert "secret" not in str(caught.value)
    with pytest.raises(AddressError, match="--issuer must be an https URL"):
        ExternalIssuerConfig.parse(url, ISSUER, RELAY)


def test_the_relay_is_no_outside_issuer() -> None:
    with pytest.raises(AddressError, match="is this relay"):
        ExternalIssuerConfig.parse(RELAY, "https://issuer.example/keys", RELAY)
