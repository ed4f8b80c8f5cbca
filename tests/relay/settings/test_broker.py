from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Address

import pytest

from relay.settings.broker import BrokerChoice, BrokerOptions, choose_broker
from relay.settings.kept import KeptSettings
from schemas.addresses import AddressError, HostPort

HERE = HostPort("127.0.0.1", 8700)
EVERYWHERE = HostPort(str(IPv4Address(0)), 443)
HERE_URL, URL = "http://127.0.0.1:8700", "https://relay.example"
NOTHING = KeptSettings(tenant="acme")
OWN = KeptSettings(own_broker="mqtt://127.0.0.1:1885")
OWN_TLS = KeptSettings(own_broker="mqtts://0.0.0.0:8884")
NAMED = KeptSettings(broker="mqtts://mqtt.example", node_broker="mqtts://lan.example:1")


def free(host: str, port: int) -> HostPort:
    return HostPort(host, port)


def next_free(host: str, port: int) -> HostPort:
    return HostPort(host, port + 2)


def chosen(
    kept: KeptSettings,
    listen: HostPort = HERE,
    url: str = HERE_URL,
    asked: BrokerOptions = BrokerOptions(),  # noqa: B008 - frozen
    find_free: Callable[[str, int], HostPort] = free,
) -> BrokerChoice:
    return choose_broker(asked, kept, listen, url, find_free)


def facts(choice: BrokerChoice) -> tuple[str, str, str]:
    return str(choice.broker), str(choice.node_broker), str(choice.own)


def test_where_nothing_names_a_broker_a_relay_on_loopback_runs_one_on_loopback() -> None:
    choice = chosen(NOTHING)
    assert facts(choice) == ("mqtt://127.0.0.1:1883",) * 3
    assert choice.kept == replace(NOTHING, own_broker="mqtt://127.0.0.1:1883")
    assert choice.notes == ()


def test_a_relay_for_other_machines_runs_one_with_tls_at_its_public_name() -> None:
    choice = chosen(NOTHING, EVERYWHERE, URL)
    assert facts(choice) == (
        "mqtts://127.0.0.1:8883",
        "mqtts://relay.example:8883",
        "mqtts://0.0.0.0:8883",
    )
    at_one_address = chosen(NOTHING, HostPort("192.0.2.1", 443), URL)
    assert facts(at_one_address)[0] == "mqtts://192.0.2.1:8883"
    of_version_six = chosen(NOTHING, HostPort("::", 443), URL)
    assert facts(of_version_six)[::2] == ("mqtts://[::1]:8883", "mqtts://[::]:8883")


@pytest.mark.parametrize("asked", ["mqtt://0.0.0.0:1883", "0.0.0.0:1883", "127.0.0.1:1883"])
def test_beyond_loopback_there_is_none_without_tls(asked: str) -> None:
    assert str(chosen(NOTHING, EVERYWHERE, HERE_URL).own) == "mqtts://0.0.0.0:8883"
    with pytest.raises(AddressError, match="mqtts://HOST:PORT"):
        chosen(NOTHING, EVERYWHERE, URL, BrokerOptions(listen=asked))
    with pytest.raises(AddressError, match="mqtts://HOST:PORT"):
        chosen(NOTHING, asked=BrokerOptions(listen="mqtt://0.0.0.0:1883"))


def test_the_port_is_chosen_once_and_the_choice_is_said() -> None:
    first = chosen(NOTHING, find_free=next_free)
    assert first.notes == ("port 1883 is in use on 127.0.0.1: the broker takes 1885, and keeps it",)
    again = chosen(first.kept, find_free=free)
    assert facts(again) == facts(first)
    assert (again.kept, again.notes) == (first.kept, ())


def test_a_relay_that_is_opened_to_other_machines_gets_another_and_says_so() -> None:
    choice = chosen(OWN, EVERYWHERE, URL)
    assert str(choice.own) == "mqtts://0.0.0.0:8883"
    assert "mqtts://0.0.0.0:8883 from now on" in choice.notes[0]
    assert "mqtt://127.0.0.1:1885" in choice.notes[0]
    # The other way, its address stays: it has TLS, and nodes were told it.
    assert facts(chosen(OWN_TLS, HERE, HERE_URL))[2] == "mqtts://0.0.0.0:8884"


def test_behind_a_proxy_the_operator_has_to_say_where_nodes_reach_it() -> None:
    with pytest.raises(AddressError, match=r"mqtts://0\.0\.0\.0:8883.*--broker.*--no-broker"):
        chosen(NOTHING, HERE, URL)
    choice = chosen(NOTHING, HERE, URL, BrokerOptions(listen="mqtts://0.0.0.0"))
    assert facts(choice)[1] == "mqtts://relay.example:8883"
    assert chosen(choice.kept, HERE, URL).own == choice.own


def test_nodes_are_told_what_the_operator_names_and_that_is_kept_with_it() -> None:
    choice = chosen(NOTHING, EVERYWHERE, URL, BrokerOptions(node_broker="mqtts://nat.example:18883"))
    assert facts(choice)[1] == "mqtts://nat.example:18883"
    assert facts(chosen(choice.kept, EVERYWHERE, URL))[1] == "mqtts://nat.example:18883"


def test_a_broker_that_is_named_takes_the_place_of_the_relays_own_which_is_said() -> None:
    choice = chosen(OWN, asked=BrokerOptions(broker="mqtts://mqtt.example"))
    assert facts(choice) == ("mqtts://mqtt.example:8883", "None", "None")
    assert choice.kept == KeptSettings(broker="mqtts://mqtt.example")
    assert "no longer the relay's own at mqtt://127.0.0.1:1885" in choice.notes[0]
    assert chosen(choice.kept).notes == ()


def test_a_broker_that_was_named_stays_until_another_is_asked_for() -> None:
    assert facts(chosen(NAMED)) == ("mqtts://mqtt.example:8883", "mqtts://lan.example:1", "None")
    assert chosen(NAMED).kept == NAMED
    own = chosen(NAMED, asked=BrokerOptions(listen="127.0.0.1:1883"))
    assert facts(own) == ("mqtt://127.0.0.1:1883",) * 3
    assert own.kept == KeptSettings(own_broker="mqtt://127.0.0.1:1883")


@pytest.mark.parametrize("kept", [NOTHING, OWN, NAMED])
def test_no_broker_changes_nothing_that_is_kept(kept: KeptSettings) -> None:
    choice = chosen(kept, asked=BrokerOptions(none=True))
    assert (choice.broker, choice.node_broker, choice.own, choice.notes) == (None, None, None, ())
    assert choice.kept == kept


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (BrokerOptions(none=True, broker="x:1"), "--no-broker and --broker exclude"),
        (BrokerOptions(none=True, listen="x:1"), "--no-broker and --broker-listen exclude"),
        (BrokerOptions(none=True, node_broker="x:1"), "--no-broker and --node-broker exclude"),
        (BrokerOptions(none=True, of_a_named_one=("--broker-ca",)), "--no-broker and --broker-ca exclude"),
        (BrokerOptions(broker="x:1", listen="x:1"), "--broker and --broker-listen exclude"),
        (BrokerOptions(of_a_named_one=("--broker-ca",)), "--broker-ca is for a broker of yours"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: BrokerOptions, text: str) -> None:
    with pytest.raises(AddressError, match=text):
        chosen(NOTHING, asked=options)
