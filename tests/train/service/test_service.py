"""The service as it is used: real processes over loopback, killed, stopped, and started again."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check import cli
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.service import exit_codes
from tests.systems.mischief import Mischief
from tests.train.service.cluster import LARGE, LONG, TRAINING, Cluster, cluster, metrics, weights
from tests.train.wire_io.certificates import Authority


@pytest.fixture
def star(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster."""
    with cluster(tmp_path) as made:
        yield made


def test_workers_learn_from_the_coordinator_what_to_train(star: Cluster) -> None:
    """Workers get only an address and a secret, and end on the reference's bits.

    The ledger proves it, has every audit, and both contracts hold on it.
    """
    star.configure(wait_for=2, ledger="ledger.jsonl", metrics="metrics.jsonl", audit_share=0.25)
    coordinator = star.coordinator(anew=True)
    workers = [star.worker(anew=True), star.worker("--rank", 2)]
    assert [one.code() for one in (coordinator, *workers)] == 3 * [exit_codes.DONE]
    assert coordinator.lines[-1] == f"completed: step 12, weights {weights(TRAINING)}"
    joined = "worker: takes part as rank 2, from step 0 on"
    assert workers[1].lines[-2:] == [joined, "worker: completed"]
    steps = [one for one in metrics(star.folder) if one["what"] == "step"]
    assert [one["step"] for one in steps] == list(range(12))
    assert {tuple(one["workers"]) for one in steps} == {(0, 2)}
    assert all(one["bytes_in"] > 0 and one["bytes_out"] > 0 and one["last"] for one in steps)
    verified = star.verify("--replay")
    assert verified.code() == exit_codes.DONE, verified.text
    assert verified.lines[-1].endswith("12 steps, the same bits")
    lines = (star.folder / "ledger.jsonl").read_text().splitlines()
    audits = [one for one in map(json.loads, lines) if one.get("kind") == "audit"]
    assert [sorted(one["ranks"]) for one in audits] == 2 * 12 * [[0, 2]]
    for contract in ("distributed-training-v1.yaml", "training-integrity-v1.yaml"):
        report = star.folder / "report.json"
        judged = ["--judge", star.folder / "ledger.jsonl", "--json", report]
        cli.main(["--contract", contract, *map(str, judged)])
        found = {one["verdict"] for one in json.loads(report.read_text())["results"]}
        assert found == {"held", "inconclusive"}


def test_a_killed_coordinator_goes_on_where_it_was(star: Cluster) -> None:
    """After SIGKILL a new coordinator resumes from checkpoint and ledger.

    The workers reconnect by themselves, and the weights end on the same bits.
    """
    service: dict[str, Any] = {
        "checkpoint": {"path": "state", "every_steps": 3},
        "ledger": "ledger.jsonl",
    }
    star.configure(LONG, wait_for=2, **service)
    first = star.coordinator()
    workers = [star.worker(), star.worker()]
    first.until(r"checkpoint before step")
    first.kill()
    second = star.coordinator("--resume")
    assert int(second.until(r"from step (\d+) on").group(1)) > 0
    assert [one.code() for one in (second, *workers)] == 3 * [exit_codes.DONE]
    assert second.lines[-1] == f"completed: step 200, weights {weights(LONG)}"
    assert "left in step" in second.text, "who was there when it died is recorded as gone"
    verified = star.verify("--replay")
    assert verified.code() == exit_codes.DONE, verified.text


@pytest.mark.slow
def test_a_killed_coordinator_that_updates_goes_on_where_it_was(star: Cluster) -> None:
    """The optimizer's moments come from the checkpoint, and the weights end on the same bits."""
    service: dict[str, Any] = {
        "checkpoint": {"path": "state", "every_steps": 3},
        "ledger": "ledger.jsonl",
        "updates": "server",
    }
    star.configure(LONG, wait_for=2, **service)
    first = star.coordinator()
    workers = [star.worker(), star.worker()]
    first.until(r"checkpoint before step")
    first.kill()
    second = star.coordinator("--resume")
    assert [one.code() for one in (second, *workers)] == 3 * [exit_codes.DONE]
    assert second.lines[-1] == f"completed: step 200, weights {weights(LONG)}"
    verified = star.verify("--replay")
    assert verified.code() == exit_codes.DONE, verified.text


@pytest.mark.slow
def test_workers_leave_and_are_replaced(star: Cluster) -> None:
    """On SIGTERM a worker tells the coordinator its reason, and the other goes on.

    When this one is killed in a step, the run waits for workers, and ends on the same bits.
    """
    star.configure(LONG, wait_for=2)
    coordinator = star.coordinator()
    leaving, victim = star.worker("--rank", 1), star.worker("--rank", 0)
    coordinator.until(r"step 1/200")
    leaving.signal(signal.SIGTERM)
    assert leaving.code() == exit_codes.STOPPED
    assert leaving.lines[-1] == "worker: stopped: by SIGTERM"
    victim.kill()
    others = [star.worker(), star.worker()]
    assert [one.code() for one in (coordinator, *others)] == 3 * [exit_codes.DONE]
    assert "left: stopped by SIGTERM" in coordinator.text
    assert "worker 0 left in step" in coordinator.text
    assert coordinator.lines[-1] == f"completed: step 200, weights {weights(LONG)}"


def test_a_gradient_of_more_than_one_block(star: Cluster) -> None:
    """Over 1 MiB of gradient is sent in blocks, and a worker is killed meanwhile."""
    star.configure(LARGE, wait_for=2)
    coordinator = star.coordinator()
    victim, other = star.worker("--rank", 1), star.worker("--rank", 0)
    coordinator.until(r"step 1/60")
    victim.kill()
    assert [coordinator.code(), other.code()] == 2 * [exit_codes.DONE]
    assert "worker 1 left in step" in coordinator.text
    assert coordinator.lines[-1] == f"completed: step 60, weights {weights(LARGE)}"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.by_hand),
        pytest.param(signal.SIGINT, marks=pytest.mark.by_hand),
    ],
)
def test_a_stopped_coordinator_keeps_everything(star: Cluster, number: signal.Signals) -> None:
    """It finishes and saves its step, tells the workers, and goes on from there when resumed."""
    service: dict[str, Any] = {
        "checkpoint": {"path": "state", "every_steps": 1000},
        "ledger": "ledger.jsonl",
    }
    star.configure(LONG, **service)
    first = star.coordinator()
    worker = star.worker()
    first.until(r"step 1/200")
    first.signal(number)
    assert first.code() == exit_codes.STOPPED
    why = f"the coordinator was stopped by {number.name}"
    assert worker.code() == exit_codes.WRONG
    assert worker.lines[-1] == f"worker: failed: {why}"
    _, progress = checkpoint.load(star.folder / "state")
    assert f"stopped ({why}): step {progress['step']}, weights" in first.lines[-1]
    assert progress["step"] > 0
    second = star.coordinator("--resume")
    star.worker()
    second.until(f"from step {progress['step']} on")
    assert second.code() == exit_codes.DONE
    assert second.lines[-1] == f"completed: step 200, weights {weights(LONG)}"
    verified = star.verify("--replay")
    assert verified.code() == exit_codes.DONE, verified.text


def test_a_run_that_is_complete_stays_complete(star: Cluster) -> None:
    """A signal after the end does not change the exit code.

    Resumed, the coordinator reports a complete run and computes nothing.
    """
    star.configure(checkpoint={"path": "state", "every_steps": 5}, ledger="ledger.jsonl")
    first, worker = star.coordinator(), star.worker()
    for process in (first, worker):
        process.until("completed")
        process.signal(signal.SIGTERM)
    assert worker.code() == first.code() == exit_codes.DONE
    before = (star.folder / "ledger.jsonl").read_bytes()
    again = star.coordinator("--resume")
    again.until("completed")
    again.signal(signal.SIGINT)
    assert again.code() == exit_codes.DONE
    assert again.lines[-1].endswith(f"complete already): step 12, weights {weights(TRAINING)}")
    assert (star.folder / "ledger.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_full_disk_loses_nothing(star: Cluster) -> None:
    """A failed save is reported, the run goes on to its end, and the last checkpoint is whole."""
    big: dict[str, Any] = {**LONG, "workload": "mlp", "width": 64}
    star.configure(big, checkpoint={"path": "state", "every_steps": 1000})
    first = star.coordinator()
    worker = star.worker()
    first.until(r"step 1/200")
    first.signal(signal.SIGTERM)
    assert (first.code(), worker.code()) == (exit_codes.STOPPED, exit_codes.WRONG)
    kept = (star.folder / "state").read_bytes()
    full = star.coordinator("--resume", limit_bytes=len(kept) // 2)
    star.worker()
    assert full.code() == exit_codes.FAILED
    assert "can't be written (File too large); the checkpoint of step" in full.text
    assert f"completed: step 200, weights {weights(big)}" in full.text
    assert (star.folder / "state").read_bytes() == kept


@pytest.mark.slow
def test_a_ledger_without_a_gap(star: Cluster) -> None:
    """A run whose ledger can't be written ends without a checkpoint newer than the ledger.

    With room again it goes on, and the ledger is whole.
    """
    service: dict[str, Any] = {
        "checkpoint": {"path": "state", "every_steps": 2},
        "ledger": "ledger.jsonl",
    }
    star.configure(wait_for=1, **service)
    first = star.coordinator(limit_bytes=9000)
    worker = star.worker()
    assert first.code() == exit_codes.FAILED
    assert "the ledger ledger.jsonl can't be written (File too large)" in first.text
    assert worker.code() == exit_codes.WRONG
    assert "the ledger ledger.jsonl can't be written" in worker.lines[-1]
    second = star.coordinator("--resume")
    assert star.worker().code() == second.code() == exit_codes.DONE
    assert second.lines[-1] == f"completed: step 12, weights {weights(TRAINING)}"
    verified = star.verify("--replay")
    assert verified.code() == exit_codes.DONE, verified.text


def test_who_is_not_let_in(star: Cluster, tmp_path: Path) -> None:
    """A wrong secret, an unknown rank and an unknown host are each reported to the worker.

    The run goes on without it.
    """
    star.configure()
    coordinator = star.coordinator()
    other = tmp_path / "other"
    other.write_text("open barley, and do it soon")
    stranger, beyond = star.worker(secret=other), star.worker("--rank", 3)
    address, star.address = star.address, "no.such.host.invalid:7411"
    lost = star.worker("--patience-s", 0.1)
    assert [one.code() for one in (stranger, beyond, lost)] == 3 * [exit_codes.WRONG]
    assert stranger.lines[-1] == "worker: failed: refused: wrong secret"
    assert beyond.lines[-1] == "worker: failed: refused: rank=3: this run has ranks 0 to 2"
    assert "unknown host 'no.such.host.invalid'" in lost.lines[-1]
    star.address = address
    assert star.worker().code() == coordinator.code() == exit_codes.DONE


def test_strangers_in_the_middle_of_a_run(star: Cluster) -> None:
    """About a hundred strangers reset, drip, flood, replay and guess in the middle of a run.

    Both workers stay, and the weights end on the same bits. `make soak-real` tries ten thousand.
    """
    star.configure(LONG, wait_for=2)
    coordinator = star.coordinator()
    workers = [star.worker(), star.worker()]
    coordinator.until(r"step 1/200")
    host, port = star.address.split(":")
    mischief = Mischief(host, int(port), recorded=b"ENTP" * 99)
    asyncio.run(mischief.run(200, random.Random(0)))
    assert [one.code() for one in (coordinator, *workers)] == 3 * [exit_codes.DONE]
    assert mischief.num_answered
    assert "connections were not admitted; the last from 127.0.0.1: " in coordinator.text
    assert "left in step" not in coordinator.text
    assert coordinator.lines[-1] == f"completed: step 200, weights {weights(LONG)}"


def test_a_worker_may_be_stopped_while_it_waits(star: Cluster) -> None:
    """A worker that waits for a coordinator stops at once."""
    worker = star.worker()
    worker.until("tries again")
    worker.signal(signal.SIGTERM)
    assert worker.code() == exit_codes.STOPPED


def test_over_tls(star: Cluster) -> None:
    """Only a worker that trusts the coordinator and shows its own certificate takes part."""
    authority = Authority(star.folder, "ca")
    own, worker = authority.signed("coordinator"), authority.signed("worker")
    files = {"cert": own.cert.name, "key": own.key.name, "ca": authority.ca.name}
    star.configure(tls=files)
    coordinator = star.coordinator()
    coordinator.until("listens at")
    believing = ["--tls-ca", authority.ca]
    plain, unknown = [star.worker("--patience-s", 0.1, *given) for given in ([], believing)]
    assert [plain.code(), unknown.code()] == 2 * [exit_codes.WRONG]
    shown = ["--tls-cert", worker.cert, "--tls-key", worker.key]
    assert star.worker(*believing, *shown).code() == coordinator.code() == exit_codes.DONE
    assert coordinator.lines[-1] == f"completed: step 12, weights {weights(TRAINING)}"
