"""Each role is killed at each message of a step, and the run ends on the undisturbed bits.

`make test` kills once half of the messages have come, each message at one role or more;
`pytest -m by_hand tests/train/stages/test_doomed.py` at every message, also before and after it is
sent.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs
from tests.train.service import doomed
from tests.train.service.cluster import Cluster, Process
from tests.train.service.doomed import COORDINATOR
from tests.train.service.nursery import Strike
from tests.train.stages.conftest import EPOCHS, Undisturbed
from tests.train.stages.test_machines import configured, judged

# What each role sends and gets in a step; ranks 0, 1 and 2 are stages.
SENT = {
    COORDINATOR: ("Assign", "Weights", "Commit"),
    0: ("Activation", "Summed", "TreeNode", "Staged", "Applied"),
    1: ("Activation", "ActivationGradient", "Summed", "TreeNode", "Staged", "Applied"),
    2: ("ActivationGradient", "Summed", "TreeNode", "Staged", "Applied"),
}
GOT = {
    COORDINATOR: ("Summed", "TreeNode", "Staged", "Applied"),
    0: ("Assign", "ActivationGradient", "Weights", "Commit"),
    1: ("Assign", "Activation", "ActivationGradient", "Weights", "Commit"),
    2: ("Assign", "Activation", "Weights", "Commit"),
}
HALF = {
    COORDINATOR: GOT[COORDINATOR],
    0: ("ActivationGradient", "Commit"),
    1: ("Assign", "Weights"),
    2: ("Activation",),
}
BY_HAND = pytest.mark.by_hand
ALL_EPOCHS = 8  # 48 steps: one for each death, and none is killed near the end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "messages", "epochs"),
    [
        pytest.param("got", HALF, EPOCHS, id="half"),
        pytest.param("got", GOT, ALL_EPOCHS, id="got", marks=BY_HAND),
        *(pytest.param(one, SENT, ALL_EPOCHS, id=one, marks=BY_HAND) for one in doomed.WHEN[:-1]),
    ],
)
def test_each_role_dies_at_each_message(
    machines: Cluster,
    small: Path,
    llama: Path,
    undisturbed: Undisturbed,
    when: str,
    messages: doomed.Messages,
    epochs: int,
) -> None:
    """Before the message is sent, after, or once it has come."""
    folder = machines.folder
    section = {
        "listen": machines.address,
        "secret_file": "secret",
        "timing": {"heartbeat_s": 0.5, "dead_after_s": 3.0},
    }
    configured(
        *(folder, small, llama),
        strategy="layer_pipeline",
        workers=3,
        checkpoint_every=2,
        training={"epochs": epochs},
        coordinator=section,
    )

    def start(role: int, strikes: list[Strike], has_died: bool) -> Process:
        if role == COORDINATOR:
            more = ["--resume"] if has_died else []
            return machines.coordinator(*more, cache=folder / "own", strikes=strikes)
        return machines.worker("--rank", role, cache=folder / "theirs", strikes=strikes)

    dooms = doomed.every("kill", when, messages)
    ended = doomed.meet(dooms, start, roles=[*SENT])
    codes = [one.code() for one in ended]
    assert codes == [exit_codes.DONE] * 4, "\n".join(one.text for one in ended)
    assert runs.adapters(folder / "out") == undisturbed(epochs)
    verdicts = judged(folder / "out" / "ledger.jsonl", "distributed-training-v1.yaml")
    assert [verdicts[f"F-DP-00{number}"] for number in (1, 2, 3)] == 3 * ["held"]
    assert "falsified" not in verdicts.values()
