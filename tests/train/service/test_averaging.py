"""The coordinator that only averages: its configuration, its record, and runs with workers."""

from __future__ import annotations

import json
import re
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import ContractError
from entrenar_py.shared.trace.ledger import Reader
from entrenar_py.shared.trace.writer import Writer
from entrenar_py.train.finetune import own_models
from entrenar_py.train.model.settings import Serving
from entrenar_py.train.service import averaging, exit_codes, ledger_account
from entrenar_py.train.service.address import Address
from entrenar_py.train.service.averaging import AveragingConfig, AveragingRecord, new_ledger
from entrenar_py.train.service.run_events import Happening, Noted
from entrenar_py.train.upstream.frames import FRAME_BYTES_MAX
from entrenar_py.train.upstream.terms import AveragingRun, Patience
from entrenar_py.train.wire import effects as do
from tests.train.service.cluster import Process
from tests.train.upstream import original as send
from tests.train.upstream.averaging import run_of
from tests.train.upstream.original_worker import OriginalWorker, mean_of_samples

MIB = 2**20


class Coordinator:
    """A folder with a configuration, and the process that serves it, forked or started `anew`."""

    def __init__(self, folder: Path, *, anew: bool = False, **changes: Any) -> None:
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
        self.process = Process(told, anew=anew)
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
    run.process.until("SIGTERM: stops after the current step")
    worker.say(send.gradient(2, 0, [1.0, 2.0, 3.0]))
    assert [worker.hear()[0], worker.hear()[0]] == [5, 7]
    worker.close()
    assert run.process.code() == exit_codes.STOPPED


def test_attacks_take_little_memory(coordinate: Any) -> None:
    """Hundreds of strangers, claims of 2^62, and long frames that never come: less than 32 MiB."""
    run = coordinate(anew=True, num_steps=1)
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
    run = coordinate(anew=True, num_steps=4, world_size=num_workers)
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
        (["--insecure"], "--insecure: it is only for --wire v2"),
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
    said = capsys.readouterr().err
    assert "it already exists, and no run with --wire v2 can be continued; give another" in said
    assert (tmp_path / "l.jsonl").read_text() == "mine\n"


SMALL = "num_samples: 100\nnum_steps: 10\nworld_size: 2\n"


def load(folder: Path, text: str) -> AveragingConfig:
    """Return the configuration of the YAML `text`."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return averaging.load(path)


def problems(folder: Path, text: str) -> list[str]:
    """Return the problems of `text`, without the folder in them."""
    with pytest.raises(ContractError) as caught:
        load(folder, text)
    return [one.replace(f"{folder}/", "") for one in caught.value.problems]


def test_the_least_of_one(tmp_path: Path) -> None:
    """The smallest configuration has the defaults of the docs."""
    assert load(tmp_path, SMALL) == AveragingConfig(
        run=AveragingRun(
            num_samples=100,
            num_steps=10,
            world_size=2,
            num_shards=2,
            batch_size=100,
            num_awaited=2,
            gradient_bytes_max=FRAME_BYTES_MAX,
            components=None,
            late_joins=True,
        ),
        listen=Address("127.0.0.1", 7411),
        frame_bytes_max=FRAME_BYTES_MAX,
        patience=Patience(),
        metrics=None,
        ledger=None,
    )


def test_all_of_one(tmp_path: Path) -> None:
    """Every key is used, and paths start from the file's own folder."""
    text = SMALL + (
        "num_shards: 4\nbatch_size: 8\nwait_for: 1\ncomponents: [0, 2]\nlate_joins: false\n"
        "frame_bytes_max: 4294967295\ngradient_bytes_max: 9000000000\nlisten: '[::1]:5000'\n"
        "timing: {hello_s: 1, dead_after_s: 2.5, shard_s: 3, gather_s: 4}\n"
        "metrics: /var/log/m.jsonl\nledger: l.jsonl\n"
    )
    assert {line.partition(":")[0] for line in text.splitlines()} == set(averaging.KEYS)
    assert load(tmp_path, text) == AveragingConfig(
        run=AveragingRun(
            num_samples=100,
            num_steps=10,
            world_size=2,
            num_shards=4,
            batch_size=8,
            num_awaited=1,
            gradient_bytes_max=9_000_000_000,
            components=(0, 2),
            late_joins=False,
        ),
        listen=Address("::1", 5000),
        frame_bytes_max=4_294_967_295,
        patience=Patience(hello_s=1, dead_after_s=2.5, shard_s=3, gather_s=4),
        metrics=Path("/var/log/m.jsonl"),
        ledger=tmp_path / "l.jsonl",
    )


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """What is missing, what is wrong, and what is not known."""
    assert sorted(problems(tmp_path, "num_sample: 3\nworld_size: two\n")) == [
        "run.yaml:1:1: error: configuration: key 'num_sample' is not read; did you mean "
        "'num_samples'?",
        "run.yaml:1:1: error: num_samples is missing: number of samples in the data set of "
        "each worker",
        "run.yaml:1:1: error: num_steps is missing: steps of the run",
        "run.yaml:2:13: error: world_size='two': use a whole number from 1 to 65536",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("num_shards: 1", "num_shards=1: use a whole number from 2 to 65536"),
        ("num_shards: 101", "batch_size=100: use a whole number from 101 to 100"),
        ("batch_size: 1", "batch_size=1: use a whole number from 2 to 100"),
        ("batch_size: 101", "batch_size=101: use a whole number from 2 to 100"),
        ("wait_for: 3", "wait_for=3: use a whole number from 1 to 2"),
        ("wait_for: true", "wait_for=True: use a whole number from 1 to 2"),
        ("components: 3", "components=3: use a list of different numbers from 0 to 255"),
        ("components: [256]", "components=[256]: use a list"),
        ("components: [1, 1]", "components=[1, 1]: use a list of different"),
        ("components: [true]", "components=[True]: use a list"),
        ("late_joins: 3", "late_joins is true or false"),
        (
            "frame_bytes_max: 4294967296",
            "frame_bytes_max=4294967296: use a whole number from 4096 to",
        ),
        ("frame_bytes_max: 100", "frame_bytes_max=100: use a whole number from 4096"),
        ("gradient_bytes_max: 5000", "gradient_bytes_max=5000: use a whole number >= 100000000"),
        ("listen: nowhere", "address='nowhere': use host:port"),
        ("timing: 3", "timing is a mapping of hello_s, dead_after_s, shard_s, gather_s"),
        ("timing: {shard_s: 0}", "shard_s=0.0: use a number of seconds > 0"),
        ("timing: {heartbeat_s: 1}", "key 'heartbeat_s' is not read"),
        ('ledger: "a\\0b"', "a path can't contain a NUL"),
    ],
)
def test_what_is_wrong(line: str, problem: str, tmp_path: Path) -> None:
    """Each problem has the place, the value and what to use."""
    (told,) = problems(tmp_path, f"{SMALL}{line}\n")
    assert told.startswith(("run.yaml:4:", "run.yaml:1:1: error: batch_size"))
    assert problem in told


@pytest.mark.parametrize("key", averaging.NOT_HERE)
def test_what_would_be_ignored(key: str, tmp_path: Path) -> None:
    """Keys of other runs are refused, with the reason."""
    (told,) = problems(tmp_path, f"{SMALL}{key}: 1\n")
    assert told == f"run.yaml:4:1: error: {key}: {averaging.NOT_HERE[key]}; leave it out"


def test_keys_of_other_runs_exist() -> None:
    """What is refused by name is a key of the other coordinator."""
    known = {field.name for one in (own_models.OwnRun, Serving) for field in fields(one)}
    assert set(averaging.NOT_HERE) <= known
    assert not set(averaging.NOT_HERE) & set(averaging.KEYS)


class FullDisk(Writer):
    """A ledger that can't be written any more."""

    def append(self, events: object) -> None:
        raise OSError(28, "No space left on device")


class Unclosed(Writer):
    """A ledger on a file system that writes when a file is closed, and can't."""

    def close(self) -> None:
        raise OSError(122, "Disk quota exceeded")


def test_a_ledger_that_can_not_be_written_ends_the_run(tmp_path: Path) -> None:
    """It is told once, and the run is given up."""
    ledger = new_ledger(tmp_path / "l.jsonl", run_of())
    ledger.__class__ = FullDisk
    record = AveragingRecord(run_of(), ledger=ledger, listeners=())
    given_up: list[str] = []
    record.give_up = given_up.append
    record.notify(do.Left(0, 1, "died"))
    record.notify(do.Left(1, 1, "died"))
    record.close()
    assert given_up == ["the ledger can't be written (No space left on device)"]
    assert record.broken == given_up[0]


def test_a_ledger_that_can_not_be_closed_is_broken(tmp_path: Path) -> None:
    """Some file systems write only when a file is closed."""
    ledger = new_ledger(tmp_path / "l.jsonl", run_of())
    ledger.close()
    ledger.__class__ = Unclosed
    record = AveragingRecord(run_of(), ledger=ledger, listeners=())
    record.close()
    record.close()
    assert record.broken == "the ledger can't be written (Disk quota exceeded)"


def test_everything_is_told_without_a_ledger() -> None:
    """Listeners hear who left and how the run ended."""
    heard: list[Happening] = []
    record = AveragingRecord(run_of(), ledger=None, listeners=[heard.append])
    record.notify(do.Left(0, 1, "died"))
    record.notify(do.Finish("failed", "nobody came"))
    record.close()
    assert heard == [
        Noted(what="left", step=0, text="worker 0 left in step 1: died"),
        Noted(what="failed", step=0, text="nobody came"),
    ]


def test_a_ledger_begins_with_the_run(tmp_path: Path) -> None:
    """Its plan has the sizes of the configuration, and no trainer."""
    run = run_of(num_samples=30, batch_size=20, num_shards=5)
    new_ledger(tmp_path / "l.jsonl", run).close()
    with (tmp_path / "l.jsonl").open("rb") as file:
        plan = Reader(file, tmp_path / "l.jsonl").head.plan
    assert (plan.workload, plan.world_size, plan.num_shards) == ("own", 2, 5)
    assert (plan.num_samples, plan.batch_size, plan.num_steps) == (30, 20, 2)


def test_an_event_that_no_ledger_holds_ends_the_run(tmp_path: Path) -> None:
    """It is not written, and the ledger stays whole."""
    path = tmp_path / "l.jsonl"
    record = AveragingRecord(run_of(), ledger=new_ledger(path, run_of()), listeners=())
    given_up: list[str] = []
    record.give_up = given_up.append
    record.notify(do.Left(0, 2**63, "died"))
    record.close()
    assert given_up == [
        "the ledger can't be written (membership step=9223372036854775808: use a whole number of "
        "at most 63 bits)"
    ]
    assert ledger_account.read(path).num_lines == 1
