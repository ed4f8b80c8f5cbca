import pytest

from schemas.addresses import (
    AddressError,
    HostPort,
    address_group,
    check_private_url,
    connect_url,
    is_loopback,
    mcp_url,
    normal_url,
    parse_broker,
    parse_host_port,
    parse_mcp_url,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("127.0.0.1:1883", HostPort("127.0.0.1", 1883), id="an address"),
        pytest.param("broker.example:8883", HostPort("broker.example", 8883), id="a name"),
        pytest.param("[::1]:1883", HostPort("::1", 1883), id="an IPv6 address in brackets"),
        pytest.param("h:1", HostPort("h", 1), id="the first port"),
        pytest.param("h:65535", HostPort("h", 65535), id="the last port"),
    ],
)
def test_a_host_and_a_port_are_read(text: str, expected: HostPort) -> None:
    assert parse_host_port(text) == expected


@pytest.mark.parametrize("text", ["127.0.0.1:1883", "[::1]:1883", "broker.example:8883"])
def test_a_host_and_a_port_are_written_as_they_are_read(text: str) -> None:
    assert str(parse_host_port(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("127.0.0.1", id="no port"),
        pytest.param("127.0.0.1:", id="an empty port"),
        pytest.param("[]:1883", id="empty brackets"),
        pytest.param("[::1]", id="an IPv6 address without a port"),
        pytest.param("h:0", id="port zero"),
        pytest.param("h:65536", id="a port beyond the last"),
        pytest.param("h:-1", id="a negative port"),
        pytest.param("h:+1", id="a signed port"),
        pytest.param("h: 1", id="a space before the port"),
        pytest.param("h:1_0", id="digits as Python groups them"),
        pytest.param("h:\u0661", id="digits of another script"),
        pytest.param("h:1883\n", id="a line break"),
        pytest.param("h:mqtt", id="a name for a port"),
    ],
)
def test_what_is_no_host_and_port_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(AddressError, match=r"is not HOST:PORT, for example 127\.0\.0\.1:8700"):
        parse_host_port(text)


@pytest.mark.parametrize("text", ["8443", ":8443"])
def test_a_port_without_a_host_is_in_the_example(text: str) -> None:
    with pytest.raises(AddressError, match=r"is not HOST:PORT, for example 127\.0\.0\.1:8443"):
        parse_host_port(text)


@pytest.mark.parametrize(
    "text", ["mqtts://edge:hunter2@mqtt.example", "edge:hunter2@mqtt.example:1883", "tcp://e:hunter2@h"]
)
def test_a_password_in_a_brokers_address_is_not_repeated(text: str) -> None:
    with pytest.raises(AddressError, match="an address with credentials is no") as refused:
        parse_broker(text)
    assert "hunter2" not in str(refused.value)


def test_a_zone_belongs_to_link_local_addresses_alone() -> None:
    assert parse_host_port("[fe80::1%eth0]:8700") == HostPort("fe80::1%eth0", 8700)
    with pytest.raises(AddressError, match=r"has a zone, .* write \[::1\]"):
        parse_host_port("[::1%lo]:8700")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("https://relay.example", "/mcp"),
        ("wss://Relay.example/mcp", "/mcp"),
        ("https://relay.example/mcp/", "/mcp"),
        ("https://relay.example/mcp/tools", "/mcp/tools"),
        ("https://relay.example/mcp/kinds/", "/mcp/kinds"),
    ],
)
def test_the_url_of_an_mcp_endpoint_is_taken_for_the_relay_s_and_its_path(text: str, path: str) -> None:
    assert parse_mcp_url(text) == ("https://relay.example", path)


@pytest.mark.parametrize("path", ["/mcp/nodes", "/mcp/mcp", "/kinds"])
def test_a_path_that_is_none_of_mcp_is_refused(path: str) -> None:
    with pytest.raises(AddressError, match="is not the URL of a relay"):
        parse_mcp_url(f"https://relay.example{path}")


def test_options_in_the_url_of_the_mcp_endpoint_are_options_of_the_command() -> None:
    with pytest.raises(AddressError, match=r"leave out \?names=dashed .* --names and --view"):
        parse_mcp_url("https://relay.example/mcp?names=dashed")
    with pytest.raises(AddressError, match=r"leave out \?tags=a"):
        parse_mcp_url("https://relay.example/mcp/kinds?tags=a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("https://relay.example", "https://relay.example", id="normal already"),
        pytest.param("https://relay.example/", "https://relay.example", id="a slash"),
        pytest.param("https://Relay.EXAMPLE", "https://relay.example", id="capitals in the host"),
        pytest.param("HTTPS://relay.example", "https://relay.example", id="capitals in the scheme"),
        pytest.param("wss://relay.example", "https://relay.example", id="the WebSocket's scheme"),
        pytest.param("ws://127.0.0.1:8700", "http://127.0.0.1:8700", id="the WebSocket's plain scheme"),
        pytest.param("https://relay.example:443", "https://relay.example", id="the usual port"),
        pytest.param("http://localhost:80", "http://localhost", id="the usual plain port"),
        pytest.param("http://localhost:443", "http://localhost:443", id="the other's usual port"),
        pytest.param("https://relay.example:8443/", "https://relay.example:8443", id="a port of its own"),
        pytest.param("https://[::1]:443", "https://[::1]", id="IPv6"),
        pytest.param("https://[::1]:8443", "https://[::1]:8443", id="IPv6 and a port"),
    ],
)
def test_a_relay_has_one_spelling(text: str, expected: str) -> None:
    assert normal_url(text) == expected
    assert normal_url(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("relay.example", id="no scheme"),
        pytest.param("//relay.example", id="only slashes"),
        pytest.param("ftp://relay.example", id="another scheme"),
        pytest.param("https://", id="no host"),
        pytest.param("https://relay.example/mcp", id="a path"),
        pytest.param("https://relay.example?tenant=acme", id="a query"),
        pytest.param("https://relay.example#top", id="a fragment"),
        pytest.param("https://user@relay.example", id="a user"),
        pytest.param("https://:secret@relay.example", id="a password"),
        pytest.param("https://@relay.example", id="an empty user"),
        pytest.param("https://relay.example:99999", id="a port beyond the last"),
        pytest.param("https://relay.example:port", id="a port that is none"),
        pytest.param("https://[::1", id="a bracket that never ends"),
        pytest.param("https://r\u00e9lay.example", id="not ASCII"),
        pytest.param("https://relay .example", id="a space"),
        pytest.param("https://relay.example\n", id="a line break, which the standard library drops"),
        pytest.param("https://relay\t.example", id="a tab, which the standard library drops"),
    ],
)
def test_what_is_no_relay_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        AddressError, match=r"is not the URL of a relay, for example https://relay\.example"
    ) as no:
        normal_url(text)
    assert "secret" not in str(no.value)


@pytest.mark.parametrize(
    ("relay", "url"),
    [
        pytest.param("https://relay.example", "wss://relay.example/devices/connect", id="encrypted"),
        pytest.param("https://10.0.0.1:8443", "wss://10.0.0.1:8443/devices/connect", id="on a network"),
        pytest.param("http://127.0.0.1:8700", "ws://127.0.0.1:8700/devices/connect", id="this machine"),
        pytest.param("http://127.8.8.8", "ws://127.8.8.8/devices/connect", id="all of 127/8"),
        pytest.param("http://localhost:8700", "ws://localhost:8700/devices/connect", id="by name"),
        pytest.param("http://[::1]:8700", "ws://[::1]:8700/devices/connect", id="IPv6"),
    ],
)
def test_the_nodes_connect_url_is_below_the_relays_url(relay: str, url: str) -> None:
    assert connect_url(relay) == url


@pytest.mark.parametrize(
    "relay",
    [
        "http://relay.example",
        "http://10.0.0.1",
        "http://0.0.0.0:8700",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "http://[2001:db8::1]",
    ],
)
def test_no_command_travels_in_the_clear_over_a_network(relay: str) -> None:
    with pytest.raises(AddressError, match="is not encrypted: use https, or say --insecure-plain-transports"):
        check_private_url(relay, plain_allowed=False)
    check_private_url(relay, plain_allowed=True)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.255.255.254", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - a name, not a binding
        ("::", False),
        ("128.0.0.1", False),
        ("localhost.example", False),
        ("evil-localhost", False),
        ("", False),
        ("127.1", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, *, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_agents_speak_to_a_path_of_their_own() -> None:
    assert mcp_url("https://relay.example:8443") == "https://relay.example:8443/mcp"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("203.0.113.7", "::ffff:203.0.113.7"),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff"),
        ("fe80::1%eth0", "fe80::2%eth1"),
    ],
)
def test_addresses_of_one_subscriber_are_one_group(one: str, other: str) -> None:
    assert address_group(one) == address_group(other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [("203.0.113.7", "203.0.113.8"), ("2001:db8:1:2::1", "2001:db8:1:3::1"), ("0.0.0.1", "::1:0:0:0:0")],
)
def test_addresses_of_two_subscribers_are_two_groups(one: str, other: str) -> None:
    assert address_group(one) != address_group(other)


def test_a_group_reads_as_a_network() -> None:
    assert address_group("2001:db8:1:2::1") == "2001:db8:1:2::/64"
    assert address_group("::ffff:203.0.113.7") == "203.0.113.7"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "", "unknown"])
def test_this_machine_and_what_is_no_address_are_in_no_group(address: str) -> None:
    assert address_group(address) is None
