"""The command line of `entrenar`: its help, its options, its refusals, and its exit codes."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from entrenar_py import compute as backends
from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import BackendUnavailable, CheckpointError, UsageError
from entrenar_py.shared.systems import AUTO
from entrenar_py.train import cli as options
from entrenar_py.train.service import exit_codes, ledger_account, signals
from entrenar_py.train.service.address import Address

GOLDEN = Path(__file__).parents[1] / "golden"
WORKER = "worker --coordinator trainer.example:7411 --secret-file s"


@pytest.mark.parametrize(
    ("arguments", "golden"),
    [
        ("--help", "entrenar-help.txt"),
        ("coordinator --help", "entrenar-coordinator-help.txt"),
        ("worker --help", "entrenar-worker-help.txt"),
        ("ledger verify --help", "entrenar-ledger-verify-help.txt"),
        ("watch --help", "entrenar-watch-help.txt"),
        ("doctor --help", "entrenar-doctor-help.txt"),
        ("finetune --help", "entrenar-finetune-help.txt"),
        ("plan --help", "entrenar-plan-help.txt"),
        ("infer --help", "entrenar-infer-help.txt"),
        ("merge --help", "entrenar-merge-help.txt"),
        ("eval --help", "entrenar-eval-help.txt"),
        ("distill --help", "entrenar-distill-help.txt"),
        ("distill logits --help", "entrenar-distill-logits-help.txt"),
        ("distill train --help", "entrenar-distill-train-help.txt"),
        ("distill status --help", "entrenar-distill-status-help.txt"),
        ("pipeline --help", "entrenar-pipeline-help.txt"),
        ("pipeline plan --help", "entrenar-pipeline-plan-help.txt"),
        ("pipeline import --help", "entrenar-pipeline-import-help.txt"),
        ("distill text --help", "entrenar-distill-text-help.txt"),
    ],
)
def test_help(
    arguments: str,
    golden: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command's help equals its golden file."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as left:
        options.parse(arguments.split())
    assert left.value.code == 0
    assert capsys.readouterr().out == (GOLDEN / golden).read_text(encoding="utf-8")


def test_help_has_the_commands_own_exit_codes_alone() -> None:
    """Each command that does something has an entry; what others return is not shown."""
    shown = {}
    for name, command in _commands(options.parser()):
        _, _, codes = (command.epilog or "").partition("exit codes:\n")
        shown[name] = [int(line[2]) for line in codes.splitlines() if line[2:3].isdigit()]
    assert shown["finetune"] == [0, 1, 2, 3, 6]
    assert shown["ledger verify"] == [0, 1, 2, 3, 4, 6]
    assert shown["merge"] == [0, 2, 3, 6]
    groups = {name for name in shown if any(one.startswith(f"{name} ") for one in shown)}
    assert {name for name in shown if shown[name] == [*exit_codes.MEANINGS]} - {
        "ledger verify"
    } == (groups)
    assert shown["watch"] == []


def _commands(cli: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command by its name as typed, those of groups after the group."""
    for action in cli._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command.prog.removeprefix("entrenar "), command
                yield from _commands(command)


def test_what_a_worker_is_given() -> None:
    """The other options have defaults, and the backend is exactly the requested one."""
    given = options.parse(WORKER.split())
    assert given.coordinator == Address("trainer.example", 7411)
    assert (given.secret_file, given.backend) == (Path("s"), "cpu")
    assert (given.rank, given.patience_s) == (None, options.PATIENCE_S)
    given = options.parse(
        [*WORKER.split(), "--rank", "7", "--backend", "auto", "--patience-s", "3"]
    )
    assert (given.rank, given.backend, given.patience_s) == (7, "auto", 3.0)


def test_every_backend_can_be_asked_for() -> None:
    """Each backend is accepted by name, and by index where there may be several. Others are not."""
    for name in (*backends.BACKENDS, AUTO, "wgpu:1", "cuda:0"):
        assert options.parse([*WORKER.split(), "--backend", name]).backend == name
    for name in ("tpu", "cpu:0", "wgpu:", "wgpu:one", "wgpu:-1", "auto:1"):
        with pytest.raises(UsageError, match=r"allowed are cuda, wgpu, cpu, cuda:N, wgpu:N, auto"):
            options.parse([*WORKER.split(), "--backend", name])


def test_every_exit_code_has_its_line() -> None:
    """Every exit code has a meaning in the help."""
    assert {*exit_codes.OF_FINISH.values()} <= {*exit_codes.MEANINGS}
    assert len({*exit_codes.MEANINGS.values()}) == len(exit_codes.MEANINGS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND; see entrenar --help"),
        ("train", "invalid choice: 'train'"),
        ("coordinator", "required: CONFIG.yaml; see entrenar coordinator --help"),
        ("coordinator c.yaml --resum", "unrecognized arguments: --resum"),
        ("worker", "the following arguments are required: --coordinator, --secret-file"),
        (f"{WORKER} --coordinator host", "address='host': use host:port"),
        (f"{WORKER} --coordinator host:0", "port 0: use 1 to 65535"),
        (f"{WORKER} --backend tpu", "backend='tpu': allowed are cuda, wgpu, cpu"),
        (f"{WORKER} --rank -1", "'-1': use a whole number from 0 to 10^18 - 1"),
        (f"{WORKER} --rank 1.5", "'1.5': use a whole number from 0 to 10^18 - 1"),
        (f"{WORKER} --patience-s 0", "'0': use a number of seconds > 0"),
        (f"{WORKER} --patience-s soon", "'soon': use a number of seconds > 0"),
        (f"{WORKER} --tls-cert c --tls-key k", "--tls-key need --tls-ca, the authority"),
        (f"{WORKER} --tls-key k", "--tls-key need --tls-ca, the authority"),
        ("ledger", "the following arguments are required: ACTION"),
        ("ledger verify", "the following arguments are required: PATH"),
    ],
)
def test_refused(line: str, message: str) -> None:
    """An invalid command line is refused with the option's name."""
    with pytest.raises(UsageError) as refusal:
        options.parse(line.split())
    assert message in str(refusal.value)


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
