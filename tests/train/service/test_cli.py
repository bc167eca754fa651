"""The command `entrenar` reports each error in one line, with its own exit code."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import BackendUnavailable, CheckpointError
from entrenar_py.train.service import exit_codes, ledger_account, signals

HEAVY = ("torch", "numpy", "rich", "yaml", "wgpu", "blake3", "asyncio")


def test_help_is_instant() -> None:
    """`--help` imports nothing heavy."""
    code = (
        "import sys\nfrom entrenar_py import entrenar as cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stdout.endswith("\n[]\n"), ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "entrenar: argument COMMAND: invalid choice: 'train'"),
        (["coordinator", "absent.yaml"], "absent.yaml:1:1: error: can't be read: No such file"),
        (
            ["worker", "--coordinator", "127.0.0.1:1", "--secret-file", "absent"],
            "entrenar: secret_file=absent: can't be read (No such file or directory)",
        ),
        (["ledger", "verify", "absent"], "entrenar: ledger absent: can't be read (No such file"),
    ],
)
def test_what_is_invalid(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Invalid input gives exit code 2 and one line, and nothing runs."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == exit_codes.INVALID
    output = capsys.readouterr()
    assert output.err.startswith(said)
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize("number", signals.NUMBERS)
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_signal_while_all_is_being_loaded(
    number: signal.Signals,
    is_lost: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 6 and one line, even if a library makes an exception of its own of it."""

    def load(path: Path, *, replay: bool) -> NoReturn:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            if is_lost:
                raise ImportError("half of a module") from error
            raise
        raise AssertionError("it was not interrupted")

    monkeypatch.setattr(ledger_account, "verify", load)
    assert cli.main(["ledger", "verify", "l"]) == exit_codes.STOPPED
    told = f"entrenar: interrupted by {number.name} before anything had begun\n"
    assert capsys.readouterr().err == told


def test_an_interrupt_that_an_import_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended some seconds later; no supervisor has to kill it."""
    ended = threading.Event()
    monkeypatch.setattr(signals, "LOST_S", 0.0)
    monkeypatch.setattr(signals, "end", ended.set)

    def load(path: Path, *, replay: bool) -> int:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert ended.wait(20.0)
        return exit_codes.DONE

    monkeypatch.setattr(ledger_account, "verify", load)
    assert cli.main(["ledger", "verify", "l"]) == exit_codes.DONE


def test_a_hang_up_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `nohup` starts goes on when its terminal is closed."""

    def verify(path: Path, *, replay: bool) -> int:
        signal.raise_signal(signal.SIGHUP)
        return exit_codes.DONE

    monkeypatch.setattr(ledger_account, "verify", verify)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert cli.main(["ledger", "verify", "l"]) == exit_codes.DONE


def test_an_interrupt_that_got_lost_stops_the_run() -> None:
    """If an import swallowed it, it counts as soon as the run begins."""
    signals.interrupt()
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    stopped = list[signal.Signals]()

    async def story() -> None:
        signals.deliver(stopped.append)
        await asyncio.sleep(0)

    asyncio.run(story())
    assert stopped == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            CheckpointError("it is of another run"),
            exit_codes.INVALID,
            "entrenar: it is of another run",
        ),
        (BackendUnavailable("no such device"), exit_codes.FAILED, "entrenar: no such device"),
        (
            KeyboardInterrupt(),
            exit_codes.STOPPED,
            "entrenar: interrupted before anything had begun",
        ),
        (ZeroDivisionError("oh"), exit_codes.FAILED, "Traceback"),
    ],
)
def test_what_goes_wrong(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each kind of error has its exit code, and a bug shows its traceback."""

    def fail(path: Path, *, replay: bool) -> NoReturn:
        raise error

    monkeypatch.setattr(ledger_account, "verify", fail)
    assert cli.main(["ledger", "verify", "l"]) == code
    assert capsys.readouterr().err.startswith(said)
