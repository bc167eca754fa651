"""A star of fine-tuning workers is struck at each message, and ends on the undisturbed adapters.

Coordinator and workers are killed, stopped for too long, and cut off by a reset of the connection,
before a message is sent, after it, and once it has come; over TCP and over TLS. `make test` tries
some of that; `pytest -m by_hand tests/train/finetune/test_doomed.py` all of it: 252 dooms in 18
runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs
from tests.train.service import doomed
from tests.train.service.cluster import Cluster, Process, cluster
from tests.train.service.doomed import COORDINATOR, Doom
from tests.train.service.nursery import Strike
from tests.train.wire_io.certificates import Authority

EPOCHS = 4  # 20 steps: one for each message
OF_COORDINATOR = ("Challenge", "Offer", "Piece", "Welcome", "Assign", "Average", "Commit")
OF_WORKERS = ("Hello", "Want", "Loaded", "Computed", "TreeNode", "Staged", "Applied")
# Each worker meets the dooms of every second message.
SENT = {COORDINATOR: OF_COORDINATOR, 0: OF_WORKERS[::2], 1: OF_WORKERS[1::2]}
GOT = {COORDINATOR: OF_WORKERS, 0: OF_COORDINATOR[::2], 1: OF_COORDINATOR[1::2]}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Cluster]:
    """Processes that are ended with the test."""
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one process writes."""
    folder = tmp_path_factory.mktemp("alone")
    runs.configured(folder, small, training={"epochs": EPOCHS}, workers=1)
    assert cli.main(["finetune", str(folder / "run.yaml")]) == exit_codes.DONE
    return folder / "out"


def struck(
    machines: Cluster, small: Path, undisturbed: Path, dooms: list[Doom], *, over_tls: bool
) -> None:
    """Run a star that meets the `dooms`; AssertionError unless it ends as if there were none."""
    folder, proofs = machines.folder, list[object]()
    section: dict[str, Any] = {
        "listen": machines.address,
        "secret_file": "secret",
        "wait_for": 2,
        "timing": doomed.TIMING,
    }
    if over_tls:
        ours = Authority(folder, "ours")
        server, worker = ours.signed("server"), ours.signed("worker")
        section["tls"] = {"cert": str(server.cert), "key": str(server.key), "ca": str(ours.ca)}
        proofs = ["--tls-ca", ours.ca, "--tls-cert", worker.cert, "--tls-key", worker.key]
    runs.configured(
        *(folder, small),
        training={"epochs": EPOCHS},
        workers=2,
        checkpoint_every=2,
        coordinator=section,
    )

    def start(role: int, strikes: list[Strike], has_died: bool) -> Process:
        if role == COORDINATOR:
            more = ["--resume"] if has_died else []
            return machines.coordinator(*more, cache=folder / "own", strikes=strikes)
        return machines.worker(*("--rank", role, *proofs), cache=folder / "theirs", strikes=strikes)

    ended = doomed.meet(dooms, start, roles=[*SENT])
    told = "\n---\n".join(one.text for one in ended)
    for role, process in zip(SENT, ended, strict=True):
        # A worker that is back when the others are nearly done may find no coordinator any more.
        was_away = any(one.role == role and one.how in ("kill", "stop") for one in dooms)
        is_late = was_away and role != COORDINATOR and "not admitted at" in process.lines[-1]
        assert process.code() == (exit_codes.WRONG if is_late else exit_codes.DONE), told
    assert "Traceback" not in told
    assert runs.adapters(folder / "out") == runs.adapters(undisturbed)
    names = [{path.name for path in one.iterdir()} for one in (folder / "out", undisturbed)]
    assert names[0] == names[1]
    assert not [*(folder / "theirs").rglob("*.part")]
    assert cli.main(["ledger", "verify", str(folder / "out" / "ledger.jsonl")]) == exit_codes.DONE


def test_some_messages(machines: Cluster, small: Path, undisturbed: Path) -> None:
    """Each kind of doom, to coordinator and workers, over TLS."""
    dooms = [
        Doom(0, "reset", "got", "Piece"),
        Doom(1, "reset", "sent", "Loaded"),
        Doom(COORDINATOR, "reset", "got", "TreeNode"),
        Doom(COORDINATOR, "clock", "sent", "Assign"),
        Doom(0, "clock", "got", "Assign"),
        Doom(0, "stop", "sent", "Staged"),
        Doom(1, "kill", "got", "Average"),
        Doom(COORDINATOR, "kill", "sent", "Commit"),
    ]
    struck(machines, small, undisturbed, dooms, over_tls=True)


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.parametrize("over_tls", [False, True])
@pytest.mark.parametrize("when", doomed.WHEN)
@pytest.mark.parametrize("how", doomed.HOW)
def test_every_message(
    machines: Cluster, small: Path, undisturbed: Path, how: str, when: str, over_tls: bool
) -> None:
    """The adapters have the undisturbed bytes, all exit codes are 0, and nothing is left over."""
    dooms = doomed.every(how, when, GOT if when == "got" else SENT)
    struck(machines, small, undisturbed, dooms, over_tls=over_tls)
