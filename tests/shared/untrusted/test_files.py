"""Files of others: what is none costs a message, at every door, and never more than is allowed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from entrenar_py import entrenar as service
from entrenar_py.check import cli
from entrenar_py.check.harness import counterexamples, judgement, plan
from entrenar_py.check.rank_files import observed_run, rank_file
from entrenar_py.shared.errors import CheckpointError, TraceError, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import ledger
from entrenar_py.shared.untrusted import files
from entrenar_py.train.coordinator.server import Server
from tests.fuzz import bad_contents
from tests.fuzz.bad_files import KINDS

NO_FILES = ("folder", "pipe", "socket", "zero", "full", "loop", "missing")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in its own, and a pipe that nobody writes is soon given up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "PIPE_S", 0.01)
    bad_contents.write_good(tmp_path)


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("read", [files.open_file, lambda path: files.read(path, bytes_max=9)])
def test_what_is_no_file(kind: str, read: Callable[[Path], object]) -> None:
    """An OSError at once, which says what it is."""
    KINDS[kind](Path("bad"))
    with pytest.raises(OSError) as caught:
        read(Path("bad"))
    assert caught.value.strerror


def test_no_path_at_all() -> None:
    """A NUL, half a character: an OSError as well."""
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="not a possible path"):
            files.read(Path(name), bytes_max=9)


def test_too_large() -> None:
    """Said before it is read; a line, when it is met."""
    Path("a").write_bytes(b"0123456789\n")
    with pytest.raises(OSError, match="it has 11 bytes or more; at most 10 are read"):
        files.read(Path("a"), bytes_max=10)
    with pytest.raises(OSError, match="at most 10 are read"):
        files.open_file(Path("a"), bytes_max=10)
    with (
        files.open_file(Path("a")) as file,
        pytest.raises(OSError, match="line 1 is longer than 5 bytes"),
    ):
        list(files.lines(file, bytes_max=5))
    assert files.read(Path("a"), bytes_max=11) == b"0123456789\n"


def test_a_pipe_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell's `<(command)`: all of it is read, unless it is too much."""
    monkeypatch.setattr(files, "PIPE_S", 10.0)
    os.mkfifo("pipe")
    data = b"x" * 100_000
    large = threading.Thread(target=Path("pipe").write_bytes, args=(data,))
    large.start()
    assert files.read(Path("pipe"), bytes_max=len(data)) == data
    large.join()
    small = threading.Thread(target=Path("pipe").write_bytes, args=(b"x" * 11,))
    small.start()
    with pytest.raises(OSError, match="at most 10 are read"):
        files.read(Path("pipe"), bytes_max=10)
    small.join()


DOORS: dict[str, tuple[str, ...]] = {
    "trace": ("check", "--contract", "contract.yaml", "--judge", "bad"),
    "rank file": ("check", "--contract", "contract.yaml", "--judge", "00000-000.rank.jsonl"),
    "replay": ("check", "--contract", "contract.yaml", "--replay", "bad"),
    "contract": ("check", "--contract", "bad"),
    "configuration": ("coordinator", "bad"),
    "verify": ("ledger", "verify", "bad"),
    "secret": ("worker", "--coordinator", "127.0.0.1:9", "--secret-file", "bad"),
    "ca": (
        *("worker", "--coordinator", "127.0.0.1:9", "--secret-file", "secret"),
        *("--tls-ca", "bad"),
    ),
}


@pytest.mark.parametrize("kind", ["pipe", "zero"])
@pytest.mark.parametrize("door", DOORS)
def test_doors(door: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe without an end, a device without one: exit 2 and one line."""
    KINDS[kind](Path("bad"))
    if door == "rank file":
        Path("bad").rename("00000-000.rank.jsonl")
    name, *arguments = DOORS[door]
    code = cli.main(arguments) if name == "check" else service.main([name, *arguments])
    assert code == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1, printed.err
    assert "it is a" in printed.err
    assert printed.out == ""


# --- rank files -------------------------------------------------------------------------------


REFUSED = {
    "rank text": "rank='a': use a whole number from 0 to 65535",
    "rank beyond": "rank=1 with world_size=1: ranks count from 0",
    "world big": "world_size=1000000000000: use a whole number from 1 to 65536",
    "no world": "header without world_size, a whole number from 1 to 65536; record",
    "groups items": "groups=.*: use a list of mappings from names to numbers",
    "deep": "not JSON",
    "local": "buffers=.*: use a list of names",
    "fault kind": "fault kind=7: allowed are",
    "no base64": "update weights=.*: Only base64 data is allowed",
    "step less": "step=-5: steps count from 0",
    "closed early": "a line after the end of training; give the file as written",
}


@pytest.mark.parametrize("name", REFUSED)
def test_rank_files_that_are_refused(name: str) -> None:
    """With the line, and what is allowed there."""
    path = Path("00000-000.rank.jsonl")
    path.write_bytes(bad_contents.RANK_FILES[name])
    with pytest.raises(TraceError, match=rf"00000-000.rank.jsonl:[1-6]: {REFUSED[name]}"):
        rank_file.load(path)


def test_a_rank_file_of_another_name() -> None:
    """It is no rank's."""
    path = Path("mine.rank.jsonl")
    path.write_bytes(bad_contents.rank_lines())
    with pytest.raises(TraceError, match=r"its name is not RANK-RESTARTS.rank.jsonl, as in 0"):
        rank_file.load(path)


def test_more_than_a_judge_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message gives the size of a rank's file or a trace, and the limit."""
    path = Path("00000-000.rank.jsonl")
    path.write_bytes(bad_contents.rank_lines())
    monkeypatch.setattr(rank_file, "EVENTS_MAX", 2)
    with pytest.raises(TraceError, match="jsonl:4: more than 2 events; record fewer steps"):
        rank_file.load(path)
    monkeypatch.setattr(rank_file, "FILE_BYTES_MAX", 100)
    with pytest.raises(TraceError, match=r"\d+ bytes or more; at most 100 are read\); record few"):
        rank_file.load(path)
    bad_contents.TRACES["environment"](Path("trace.jsonl"))
    monkeypatch.setattr(ledger, "EVENTS_MAX", 0)
    with pytest.raises(TraceError, match="more than 0 events"):
        judgement.load_stored([Path("trace.jsonl")])


def test_many_ranks_are_put_together_in_time() -> None:
    """65536 ranks said to be along one axis cost no more than those that are there."""
    header = {**bad_contents.HEADER, "world_size": 2**16}
    layout = {"kind": "layout", "axes": {"tp": 2**16}, "tied": [], "pieces": {}}
    path = Path("00000-000.rank.jsonl")
    path.write_bytes(bad_contents.rank_lines(header, layout, *bad_contents.EVENTS))
    found = observed_run.load([path])
    assert found.end.status == "failed"


# --- checkpoints and counterexamples ----------------------------------------------------------


@pytest.mark.parametrize("name", bad_contents.CHECKPOINTS)
def test_checkpoints(name: str) -> None:
    """A right digest on wrong contents: CheckpointError that names what it is."""
    path = Path("bad")
    bad_contents.CHECKPOINTS[name](path)
    server = Server(Scenario(system="parameter_server", **bad_contents.TRAINING))
    server.checkpoint_path = path
    with pytest.raises(
        CheckpointError, match=r"^checkpoint bad: (\w+=|tensor |it was saved by a run)"
    ):
        server.restore()


def test_a_checkpoint_that_is_right() -> None:
    """The checkpoint from which the bad ones are made is accepted."""
    bad_contents.saved(Path("good"))
    server = Server(Scenario(system="parameter_server", **bad_contents.TRAINING))
    server.checkpoint_path = Path("good")
    assert server.restore() == 1


@pytest.mark.parametrize("name", ["steps", "samples", "batch", "workers", "width", "shards"])
def test_counterexamples_that_never_end(name: str) -> None:
    """10^12 of anything is refused before it is tried."""
    path = Path("bad.json")
    path.write_bytes(bad_contents.REPLAYS[name])
    with pytest.raises(UsageError, match=r"=1000000000000"):
        plan.require_known(counterexamples.load(path).scenario, "replay file")


def test_a_counterexample_of_no_clause() -> None:
    """Its clause is an id."""
    Path("bad.json").write_bytes(bad_contents.REPLAYS["invariant"])
    with pytest.raises(TraceError, match=r"invariant=\[7\]: use text"):
        counterexamples.load(Path("bad.json"))


@pytest.mark.parametrize("key", ["ledger", "metrics"])
def test_links_in_a_circle(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The files that a coordinator writes are checked before it listens."""
    KINDS["loop"](Path("bad"))
    bad_contents.write_configuration(Path("run.yaml"), **{key: "bad"})
    assert service.main(["coordinator", "run.yaml"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    assert "bad: " in printed


def test_a_contract_that_never_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """The same in a contract's scenario, with its place."""
    scenario = json.dumps({"workload": "linear", "num_steps": 10**12})
    text = Path("contract.yaml").read_text()
    first = text.index("scenarios: [") + len("scenarios: [")
    Path("contract.yaml").write_text(text[:first] + scenario + text[text.index("]", first) :])
    assert cli.main(["--contract", "contract.yaml", "--validate"]) == 2
    told = capsys.readouterr().err
    assert "num_steps=1000000000000: use at most 1000000" in told
