"""`entrenar coordinator --wire v2` as a process, with workers that are not ours."""

from __future__ import annotations

import json
import re
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from tests.train.service.cluster import Process
from tests.train.upstream import original as send
from tests.train.upstream.original_worker import OriginalWorker, mean_of_samples

MIB = 2**20


class Coordinator:
    """A folder with a configuration, and the process that serves it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        usual: dict[str, Any] = {"num_samples": 10, "num_steps": 3, "world_size": 2}
        record = {
            **usual,
            "listen": "127.0.0.1:0",
            "metrics": "metrics.jsonl",
            "ledger": "ledger.jsonl",
            **changes,
        }
        self.folder = folder
        (folder / "run.yaml").write_text(json.dumps(record))
        told = ["coordinator", folder / "run.yaml", "--wire", "v2"]
        self.process = Process(told, anew=True)
        self.port = int(self.process.until(r"listens at 127\.0\.0\.1:(\d+)")[1])
        self._workers: list[OriginalWorker] = []

    def worker(self, node: str = "node", *, joins: bool = True) -> OriginalWorker:
        self._workers.append(OriginalWorker(self.port, node, joins=joins))
        return self._workers[-1]

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def peak_bytes(self) -> int:
        """Return the most memory that the process has had so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])

    def end(self) -> None:
        for worker in self._workers:
            worker.close()
        self.process.dismiss()


@pytest.fixture
def coordinate(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts a coordinator, which ends with the test."""
    started: list[Coordinator] = []

    def start(**changes: Any) -> Coordinator:
        started.append(Coordinator(tmp_path, **changes))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_a_run_and_its_records(coordinate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 0; metrics and ledger have every step, with the digest of its average."""
    run = coordinate()
    with ThreadPoolExecutor(2) as threads:
        workers = [run.worker(f"w{number}") for number in range(2)]
        heard = list(threads.map(lambda one: one.train(mean_of_samples), workers))
    assert run.process.code() == exit_codes.DONE
    assert "worker 0 takes part: 'w0', 'cpu', 1 GPU" in run.process.text
    assert heard[0] == heard[1]
    steps = [line for line in run.lines("metrics.jsonl") if line["what"] == "step"]
    assert [(one["step"], one["loss"], one["total"], one["num_samples"]) for one in steps] == [
        (step, 0.5, 10, 10) for step in range(3)
    ]
    events = run.lines("ledger.jsonl")
    averaged = [one for one in events if one["kind"] == "averaged"]
    assert [one["gradient"] for one in averaged] == [one["digests"] for one in steps]
    assert [one["ranks"] for one in averaged] == 3 * [[0, 1]]
    assert events[-1]["kind"] == "end"
    assert cli.main(["ledger", "verify", str(run.folder / "ledger.jsonl")]) == exit_codes.DONE
    said = capsys.readouterr().out
    assert re.search(r"steps 0 to 2 of 0 to 2, average [0-9a-f]{16} of step 2; completed", said)


def test_the_digest_is_that_of_the_bytes(coordinate: Any) -> None:
    """BLAKE3 of the float32 values of the average."""
    from blake3 import blake3

    run = coordinate(num_steps=1, world_size=1)
    (average,) = run.worker().train(mean_of_samples)
    assert run.process.code() == exit_codes.DONE
    (event,) = (one for one in run.lines("ledger.jsonl") if one["kind"] == "averaged")
    digest = blake3(struct.pack("<3f", *average[1])).hexdigest(16)
    assert event["gradient"] == {"the gradient": digest}


def test_blocks_have_no_loss_to_tell(coordinate: Any) -> None:
    """With `components` metrics have null, and each part its digest."""
    run = coordinate(num_steps=1, world_size=1, components=[4])
    worker = run.worker()
    worker.say(send.block(0, 0, 0, 1, [1], [1.0]), send.non_block(0, 0, 4, [2.0]))
    assert [worker.hear()[0] for _ in range(4)] == [3, 9, 11, 7]
    worker.close()
    assert run.process.code() == exit_codes.DONE
    (step,) = (one for one in run.lines("metrics.jsonl") if one["what"] == "step")
    assert (step["loss"], step["correct"], step["total"]) == (None, None, None)
    assert list(step["digests"]) == ["block 0", "component 4"]


def test_a_value_that_is_not_finite(coordinate: Any) -> None:
    """The run halts with exit code 1, and names worker, step and element."""
    run = coordinate(world_size=1)
    worker = run.worker("n")
    assert worker.hear()[0] == 3
    worker.say(send.gradient(0, 0, [1.0, float("nan")]))
    assert worker.hear() == (7,)
    worker.close()
    assert run.process.code() == exit_codes.WRONG
    said = "non-finite gradients[1]=nan in the gradient of step 0 from worker 0 ('n')"
    assert said in run.process.text
    halt, end = run.lines("ledger.jsonl")[-2:]
    assert (halt["kind"], end["status"]) == ("halt", "halted")
    assert said in halt["reason"]


def test_sigterm_lets_the_step_finish(coordinate: Any) -> None:
    """The average of the step in work is sent, then the end; the exit code is 6."""
    run = coordinate(world_size=1, num_steps=1000)
    worker = run.worker()
    worker.train(mean_of_samples, steps=2)
    assert worker.hear()[:2] == (3, 2)
    run.process.signal(signal.SIGTERM)
    run.process.until("SIGTERM: stops after the step in work")
    worker.say(send.gradient(2, 0, [1.0, 2.0, 3.0]))
    assert [worker.hear()[0], worker.hear()[0]] == [5, 7]
    worker.close()
    assert run.process.code() == exit_codes.STOPPED


def test_attacks_take_little_memory(coordinate: Any) -> None:
    """Hundreds of strangers, claims of 2^62, and long frames that never come: less than 32 MiB."""
    run = coordinate(num_steps=1)
    before = run.peak_bytes()
    for _ in range(300):
        run.worker(joins=False).say(struct.pack(">I", 2000) + b"\x01" + bytes(1000))
    claims = [
        send.frame(b"\x04" + struct.pack("<QIQ", 0, 0, 2**62) + bytes(20)),
        send.frame(b"\x08" + struct.pack("<QIIIQ", 0, 0, 0, 1, 2**62) + bytes(16)),
        send.frame(b"\x0a" + struct.pack("<QIBQ", 0, 0, 0, 2**62)),
        struct.pack(">I", 2**32 - 1) + b"\x04",
    ]
    steady = run.worker()
    for claim in claims:
        worker = run.worker()
        assert worker.hear()[0] == 3
        worker.say(claim)
        assert worker.is_closed()
    patient = run.worker()
    assert patient.hear()[0] == 3
    count = (99_999_999 - 41) // 4
    head = b"\x04" + struct.pack("<QIQ", 0, patient.worker, count)
    patient.say(struct.pack(">I", len(head) + 4 * count + 20) + head + bytes(4096))
    patient.close()
    assert len(steady.train(mean_of_samples)) == 1
    assert run.peak_bytes() - before < 32 * MIB
    assert run.process.code() == exit_codes.DONE


def test_memory_is_that_of_the_shards(coordinate: Any) -> None:
    """A gradient a shard and the averages of two steps are held, and little more."""
    count, num_workers = 5 * MIB, 2
    run = coordinate(num_steps=4, world_size=num_workers)
    before = run.peak_bytes()
    workers = [run.worker() for _ in range(num_workers)]
    values = np.ones(count, "<f4")
    for step in range(4):
        for worker in workers:
            assert worker.hear()[0] == 3
            head = b"\x04" + struct.pack("<QIQ", step, worker.worker, count)
            worker.say(struct.pack(">I", len(head) + values.nbytes + 20) + head)
            worker.socket.sendall(values.data)
            worker.say(struct.pack("<fQQ", 0.5, 0, 5))
        for worker in workers:
            data = worker.hear_bytes()
            assert data[0] == 5
    for worker in workers:
        assert worker.hear() == (7,)
    assert run.peak_bytes() - before <= (num_workers + 2) * values.nbytes + 16 * MIB
    for worker in workers:
        worker.close()
    assert run.process.code() == exit_codes.DONE


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume", "--wire", "v2"], "--resume with --wire v2: the workers hold the weights"),
        (["--insecure"], "--insecure: it is for --wire v2 alone"),
        (["--wire", "v1"], "argument --wire: invalid choice: 'v1'"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one line, and nothing runs."""
    assert cli.main(["coordinator", "run.yaml", *arguments]) == exit_codes.INVALID
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"listen": "0.0.0.0:0"}, "this wire has no authentication"),
        ({"listen": "192.0.2.1:0"}, "this wire has no authentication"),
        ({"listen": "no-such-host.invalid:7"}, "can't listen there"),
        ({"secret_file": "s"}, "secret_file: this wire has no authentication; leave it out"),
        ({"metrics": "same", "ledger": "same"}, "the ledger is the same file"),
        ({"metrics": "absent/m"}, "can't be written"),
    ],
)
def test_what_can_not_be_served(
    changes: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is told before anything listens, and leaves no ledger behind."""
    path = tmp_path / "run.yaml"
    usual = {"num_samples": 10, "num_steps": 3, "world_size": 2, "ledger": "l.jsonl"}
    path.write_text(json.dumps({**usual, **changes}))
    assert cli.main(["coordinator", str(path), "--wire", "v2"]) == exit_codes.INVALID
    assert said in capsys.readouterr().err
    assert not (tmp_path / "l.jsonl").exists()


def test_a_ledger_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is there is refused, and stays."""
    (tmp_path / "l.jsonl").write_text("mine\n")
    path = tmp_path / "run.yaml"
    path.write_text("{num_samples: 10, num_steps: 3, world_size: 2, ledger: l.jsonl}")
    assert cli.main(["coordinator", str(path), "--wire", "v2"]) == exit_codes.INVALID
    assert "it is there already" in capsys.readouterr().err
    assert (tmp_path / "l.jsonl").read_text() == "mine\n"
