"""Every command that reads a file, with every kind of bad file: `python -m tests.fuzz.bad_files`.

Give the name of a command (`DOOR`) to try only that one. Each case runs in a process forked from
one with everything loaded, with an alarm and a memory bound. A case is a finding if it ends with a
traceback, by a signal, with exit code 0, or with more than one message.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from entrenar_py import entrenar as service
from entrenar_py.check import cli
from entrenar_py.check.doctor import Examination
from tests.fuzz import bad_contents

SECONDS_MAX, HEAVY_S, BYTES_MAX = 20, 18, 2**31
SPARSE_BYTES = 2**34
# Cases that are valid: a missing counterexample, a folder for traces, a seed of any size, and
# ledgers without a step that are odd but complete.
RIGHT = {
    *(("known", "missing"), ("trace-dir", "folder"), ("replay", "seed"), ("rank file", "good")),
    *(("verify", name) for name in bad_contents.TRACES),
}

Make = Callable[[Path], object]
Door = Callable[[Path], int]


# --- kinds of files ---------------------------------------------------------------------------


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


KINDS: Mapping[str, Make] = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "socket": _socket,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "full": lambda path: path.symlink_to("/dev/full"),
    "loop": lambda path: path.symlink_to(path.name),
    "huge": _sparse,
    "empty": lambda path: path.touch(),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 99),
    "surrogates": lambda path: path.write_text('{"a": "\\ud800"}\n'),
    "deep": lambda path: path.write_text("[" * 100_000),
}


# --- doors ------------------------------------------------------------------------------------


def _check(*arguments: object) -> int:
    return cli.main([*map(str, arguments)])


def _serve(*arguments: object) -> int:
    return service.main([*map(str, arguments)])


def _coordinator(bad: Path, *options: str, **keys: object) -> int:
    """Run a coordinator whose configuration names the bad file."""
    bad_contents.write_configuration(Path("run.yaml"), **keys)
    return _serve("coordinator", "run.yaml", *options)


def _worker(*arguments: object) -> int:
    return _serve("worker", "--coordinator", "127.0.0.1:9", "--patience-s", "0.1", *arguments)


def _known(bad: Path) -> int:
    folder = Path("falsification", "counterexamples")
    folder.mkdir(parents=True)
    bad.rename(folder / "F-DP-001-0123.json") if bad.is_symlink() or bad.exists() else None
    return _check("--contract", "contract.yaml", "--examples", 0)


def _rank_file(bad: Path) -> int:
    path = Path("run", "00000-000.rank.jsonl")
    path.parent.mkdir()
    if bad.is_symlink() or bad.exists():
        bad.rename(path)
    return _check("--contract", "contract.yaml", "--judge", path)


def _tls(bad: Path, name: str) -> int:
    cert, key = bad_contents.certificate()
    given = {"cert": cert, "key": key, "ca": cert, name: bad}
    return _coordinator(bad, tls={key: str(path) for key, path in given.items()})


def _worker_tls(bad: Path, name: str) -> int:
    cert, key = bad_contents.certificate()
    given = {"cert": cert, "key": key, "ca": cert, name: bad}
    return _worker(
        "--secret-file",
        "secret",
        *(word for key, path in given.items() for word in (f"--tls-{key}", path)),
    )


READERS: Mapping[str, Door] = {
    "contract": lambda bad: _check("--contract", bad, "--validate"),
    "trace": lambda bad: _check("--contract", "contract.yaml", "--judge", bad),
    "rank file": _rank_file,
    "replay": lambda bad: _check("--contract", "contract.yaml", "--replay", bad),
    "known": _known,
    "configuration": lambda bad: _serve("coordinator", bad),
    "secret": lambda bad: _coordinator(bad, secret_file="bad"),
    "tls cert": partial(_tls, name="cert"),
    "tls key": partial(_tls, name="key"),
    "tls ca": partial(_tls, name="ca"),
    "checkpoint": lambda bad: _coordinator(bad, "--resume", checkpoint=bad_contents.EVERY_STEP),
    "ledger": lambda bad: _coordinator(
        bad, "--resume", checkpoint={**bad_contents.EVERY_STEP, "path": "none"}, ledger="bad"
    ),
    "worker secret": lambda bad: _worker("--secret-file", bad),
    "worker ca": partial(_worker_tls, name="ca"),
    "verify": lambda bad: _serve("ledger", "verify", bad),
}
WRITERS: Mapping[str, Door] = {
    "json": lambda bad: _check("--contract", "contract.yaml", "--examples", 0, "--json", bad),
    "junit": lambda bad: _check("--contract", "contract.yaml", "--examples", 0, "--junit", bad),
    "trace-dir": lambda bad: _check(
        "--contract", "contract.yaml", "--examples", 0, "--trace-dir", bad
    ),
    "metrics": lambda bad: _coordinator(bad, metrics="bad"),
    "new ledger": lambda bad: _coordinator(bad, ledger="bad"),
    "doctor": lambda bad: _serve("doctor", "--json", bad),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case."""

    code: int | None
    seconds: float
    mib: float
    text: str

    @property
    def finding(self) -> str:
        """Return the kind of finding that the outcome is, or ""."""
        if self.code is None:
            return "KILLED"
        if "Traceback" in self.text or "bug" in self.text:
            return "CRASHED"
        if self.code == 0:
            return "TAKEN"
        if not self.text.strip():
            return "SILENT"
        if self.seconds > HEAVY_S or self.mib > 2**10:
            return "HEAVY"
        return ""


def run(door: Door, make: Make) -> Outcome:
    """Run one case in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _case(door, make, Path(folder))
        _, status, usage = os.wait4(pid, 0)
        text = Path(folder, "output").read_text(errors="replace")
        ended = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return Outcome(ended, time.monotonic() - started, usage.ru_maxrss / 1024, text)


def _case(door: Door, make: Make, folder: Path) -> None:
    code = 99
    try:
        os.chdir(folder)
        output = os.open("output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest may have replaced these streams.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
        signal.alarm(SECONDS_MAX)
        resource.setrlimit(resource.RLIMIT_DATA, (_data() + BYTES_MAX,) * 2)
        bad_contents.write_good(folder)
        make(Path("bad"))
        try:
            code = door(Path("bad"))
        except SystemExit as left:
            code = int(left.code or 0)
        sys.stdout.flush()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _data() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData"):
            return int(line.split()[1]) * 1024
    return 0


def cases() -> Iterator[tuple[str, str, Door, Make]]:
    """Yield the cases: command and kind of file by name, the command, and the maker of the file."""
    for name, door in READERS.items():
        for kind, make in KINDS.items():
            yield name, kind, door, make
        for kind, make in bad_contents.OF.get(name, {}).items():
            yield name, kind, door, make
    for name, door in WRITERS.items():
        for kind in ("folder", "pipe", "socket", "full", "loop"):
            yield name, kind, door, KINDS[kind]


def visit_nothing(**_: bool) -> Examination:
    """Return the examination of a machine that has no device."""
    return Examination(versions={}, backends=(), trainers=(), clauses=())


def main() -> int:
    """Print a line for each case. Return 1 if any is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.bad_files")
    parser.add_argument("door", nargs="*")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    import torch

    from entrenar_py.check import doctor
    from entrenar_py.check.cli import session  # noqa: F401
    from entrenar_py.train.service import worker  # noqa: F401

    torch.set_num_threads(1)
    doctor.examine = visit_nothing  # takes seconds, and devices
    found = 0
    for name, kind, door, make in cases():
        if options.door and name not in options.door:
            continue
        outcome = run(door, make)
        lines = outcome.text.strip().splitlines()
        said = lines[-1] if lines else ""
        cost = f"{outcome.seconds:5.1f} s {outcome.mib:5.0f} MiB"
        case = f"{outcome.finding or 'ok':8} {name:14} {kind:16} {outcome.code!s:5} {cost}"
        print(f"{case}  {len(lines)}: {said[:160]}", flush=True)
        if options.v and outcome.finding:
            print(outcome.text)
        found += bool(outcome.finding) and (outcome.code != 0 or (name, kind) not in RIGHT)
    print(f"{found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
