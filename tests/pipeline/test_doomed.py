"""Each role is killed at each message of a step, and the run ends on the undisturbed bits.

`make test` kills once a message has come; `pytest -m slow tests/pipeline/test_doomed.py` also
before and after it is sent.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.service import cli, exit_codes
from tests.finetune import runs
from tests.pipeline import doomed
from tests.pipeline.doomed import COORDINATOR, Doom
from tests.pipeline.test_machines import configured, judged
from tests.service.cluster import Cluster, Process

EPOCHS = 10  # 60 steps: one for each death


@pytest.fixture(scope="module")
def undisturbed(small: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The adapters that one process trains."""
    folder = tmp_path_factory.mktemp("alone")
    configured(folder, small, llama, training={"epochs": EPOCHS})
    assert cli.main(["finetune", str(folder / "run.yaml")]) == exit_codes.DONE
    return runs.adapters(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [*(pytest.param(one, marks=pytest.mark.by_hand) for one in doomed.WHEN[:-1]), "got"]
)
def test_each_role_dies_at_each_message(
    machines: Cluster, small: Path, llama: Path, undisturbed: bytes, when: str
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
        training={"epochs": EPOCHS},
        coordinator=section,
    )

    def start(role: int, dies_at: tuple[str, str, int] | None, has_died: bool) -> Process:
        if role == COORDINATOR:
            more = ["--resume"] if has_died else []
            return machines.coordinator(*more, cache=folder / "own", dies_at=dies_at)
        return machines.worker("--rank", role, cache=folder / "theirs", dies_at=dies_at)

    dooms: list[Doom] = [one for one in doomed.every() if one.when == when]
    ended = doomed.meet(dooms, start)
    codes = [one.code() for one in ended]
    assert codes == [exit_codes.DONE] * 4, "\n".join(one.text for one in ended)
    assert runs.adapters(folder / "out") == undisturbed
    verdicts = judged(folder / "out" / "ledger.jsonl", "distributed-training-v1.yaml")
    assert [verdicts[f"F-DP-00{number}"] for number in (1, 2, 3)] == 3 * ["held"]
    assert "falsified" not in verdicts.values()
