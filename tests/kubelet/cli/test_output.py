from pathlib import Path

import pytest

from kubelet.cli.options import next_step
from kubelet.config import SERVICE_STATE_DIR as SERVICE

HOME = Path("/home/ada/.local/state/edge-kubelet")
ELSEWHERE = Path("/srv/my node")
START = "systemctl enable --now edge-kubelet"
SYSTEMD, UNIT = "run/systemd/system", "etc/systemd/system/edge-kubelet.service"


@pytest.mark.parametrize(
    ("state_dir", "usual", "there", "step"),
    [
        pytest.param(SERVICE, SERVICE, [SYSTEMD, UNIT], START, id="a unit of the administrator's"),
        pytest.param(SERVICE, SERVICE, [SYSTEMD, f"usr/lib/{UNIT[4:]}"], START, id="a unit of the package"),
        pytest.param(
            SERVICE, SERVICE, [SYSTEMD], f"edge-kubelet service install, and then: {START}", id="no unit yet"
        ),
        pytest.param(SERVICE, SERVICE, [UNIT], "edge-kubelet run", id="no systemd"),
        pytest.param(HOME, HOME, [SYSTEMD, UNIT], "edge-kubelet run", id="a state that no service uses"),
        pytest.param(HOME, None, [], f"edge-kubelet run --state-dir {HOME}", id="none is usual"),
        pytest.param(ELSEWHERE, HOME, [], "edge-kubelet run --state-dir '/srv/my node'", id="another"),
    ],
)
def test_the_next_step_after_an_enrolment(
    tmp_path: Path, state_dir: Path, usual: Path | None, there: list[str], step: str
) -> None:
    for path in there:
        (tmp_path / path).mkdir(parents=True)
    assert next_step(state_dir, usual, tmp_path) == step
