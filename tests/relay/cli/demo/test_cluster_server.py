import re

from relay.cli.demo.cluster_server import relay_permissions
from tests.fakes.cluster_server import SHIPPED


def test_the_permissions_are_those_that_ship() -> None:
    shipped = SHIPPED.read_text("utf-8").split("RELAY = {")[1].split("\n}\n")[0]
    permissions = relay_permissions("main")
    subjects = [*permissions["publish"]["allow"], *permissions["subscribe"]["allow"]]
    assert re.findall(r'"([^"]+)"', shipped) == subjects
