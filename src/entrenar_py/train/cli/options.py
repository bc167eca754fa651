"""The command line of `entrenar`. Imports nothing heavy, so that `--help` is instant."""

from __future__ import annotations

import argparse
import functools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import entrenar_py
from entrenar_py.shared import scenario
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.train.cli import distill_options, pipeline_options
from entrenar_py.train.finetune import NEW_TOKENS
from entrenar_py.train.service import address, exit_codes, following

PROG = "entrenar"
AUTO = "auto"
WATCH = "watch"
EVERY = 10
PATIENCE_S = 300.0
OWN_WIRE, WIRE_2 = WIRES = ("own", "v2")
BANDWIDTH = "10Gbit"
_HELP_COLUMNS = 98


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


if TYPE_CHECKING:
    _Commands: TypeAlias = argparse._SubParsersAction[_Parser]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with every command and option."""
    what = "Trains and fine-tunes on one machine or several, with workers that come and go."
    cli = _Parser(prog=PROG, description=what, epilog=_epilog(), **_FORM)
    cli.add_argument("--version", action="version", version=f"%(prog)s {entrenar_py.__version__}")
    commands = cli.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    _add_coordinator(commands)
    _add_worker(commands)
    _add_ledger(commands)
    _add_watch(commands)
    _add_doctor(commands)
    _add_finetune(commands)
    pipeline_options.add(commands, _add, BANDWIDTH)
    distill_options.add(commands, _add, _add_training, _backend)
    return cli


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, `command` among them; UsageError if they are invalid."""
    program: Sequence[str] = ()
    if list(arguments[:1]) == [WATCH]:
        arguments, program = _split(arguments)
    parsed = parser().parse_args(arguments)
    parsed.program = list(program)
    if parsed.command == "worker" and parsed.tls_ca is None and (parsed.tls_cert or parsed.tls_key):
        raise UsageError(
            "--tls-cert and --tls-key need --tls-ca, the authority that the coordinator's "
            "certificate is checked against; give all three"
        )
    if parsed.command == "coordinator":
        _require_of_wire(parsed)
    return parsed


def _require_of_wire(parsed: argparse.Namespace) -> None:
    """Raise UsageError for an option of `coordinator` that the chosen wire would ignore."""
    if parsed.wire == WIRE_2 and parsed.resume:
        raise UsageError(
            f"--resume with --wire {WIRE_2}: the workers hold the weights, and the coordinator "
            "writes no checkpoint to go on from; leave --resume out"
        )
    if parsed.wire == WIRE_2 and parsed.tensorboard is not None:
        raise UsageError(
            f"--tensorboard with --wire {WIRE_2}: its coordinator writes `metrics` alone; leave "
            "--tensorboard out"
        )
    if parsed.wire == WIRE_2 and parsed.halt_on_spike:
        raise UsageError(
            f"--halt-on-spike with --wire {WIRE_2}: its workers have no message that halts them; "
            "leave --halt-on-spike out"
        )
    if parsed.wire != WIRE_2 and parsed.insecure:
        raise UsageError(
            f"--insecure: it is for --wire {WIRE_2} alone; workers of this package prove a secret"
        )


def _epilog(command: str = "") -> str:
    lines = ["exit codes:"]
    for code, meaning in exit_codes.of_command(command).items():
        lines += textwrap.wrap(
            meaning, _HELP_COLUMNS, initial_indent=f"  {code}  ", subsequent_indent=" " * 5
        )
    return "\n".join(lines)


# Arguments of all parsers.
_FORM: Mapping[str, Any] = {
    "formatter_class": functools.partial(
        argparse.RawDescriptionHelpFormatter, max_help_position=26
    ),
    "allow_abbrev": False,
}


def _add(commands: _Commands, name: str, what: str) -> _Parser:
    """Add a command called `name`, with `what` as its help."""
    sentence = f"{what[0].upper()}{what[1:]}."
    command = commands.add_parser(name, help=what, description=sentence, **_FORM)
    command.epilog = _epilog(command.prog.removeprefix(f"{PROG} "))
    return command


def _add_coordinator(commands: _Commands) -> None:
    command = _add(commands, "coordinator", "serve a run to all workers that know its secret")
    command.add_argument("config", metavar="CONFIG.yaml", type=Path, help="what to train, and how")
    command.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint, or from the start if there is none yet",
    )
    following.add_options(command)
    command.add_argument(
        "--wire",
        choices=WIRES,
        default=OWN_WIRE,
        help="what workers speak: this package's own protocol, or the original system's second "
        "layout (v2), which has no secret, and whose workers hold the weights (default own)",
    )
    command.add_argument(
        "--insecure",
        action="store_true",
        help="with --wire v2: let anyone take part who can connect from other machines",
    )


def _add_worker(commands: _Commands) -> None:
    command = _add(commands, "worker", "compute for a coordinator, which says what to train")
    command.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        required=True,
        type=_address,
        help="where the coordinator listens; an IPv6 host in brackets",
    )
    command.add_argument(
        "--secret-file", metavar="FILE", required=True, type=Path, help="the run's shared secret"
    )
    command.add_argument(
        "--tls-ca",
        metavar="FILE",
        type=Path,
        help="connect over TLS, and trust the authorities in this file (PEM)",
    )
    command.add_argument(
        "--tls-cert", metavar="FILE", type=Path, help="the certificate to show the coordinator"
    )
    command.add_argument("--tls-key", metavar="FILE", type=Path, help="the key of --tls-cert")
    command.add_argument(
        "--backend",
        metavar="NAME",
        type=_backend,
        default="cpu",
        help="what to compute on: cpu, cuda, wgpu (cuda:1, wgpu:1: the second device), or auto, "
        "the first of cuda, wgpu, cpu that works (default cpu)",
    )
    command.add_argument(
        "--model",
        metavar="FOLDER",
        type=Path,
        help="this machine's copy of the checkpoint that is fine-tuned; its files must have the "
        "hashes of the coordinator's (default: they are fetched and kept)",
    )
    command.add_argument(
        "--logits",
        metavar="FOLDER",
        type=Path,
        help="this machine's copy of the shards that a student learns from, which may still come",
    )
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python that comes with the checkpoint, if the coordinator's configuration says "
        "so, too",
    )
    command.add_argument(
        "--rank",
        metavar="N",
        type=arguments.natural,
        help="the rank to request (default: the lowest free one)",
    )
    command.add_argument(
        "--id",
        metavar="NAME",
        help="in a layer pipeline, the name by which the configuration gives this worker a stage",
    )
    command.add_argument(
        "--listen-port",
        metavar="N",
        type=_port,
        help="in a mesh or a layer pipeline, the port where other workers connect (default: any "
        "free one)",
    )
    command.add_argument(
        "--patience-s",
        metavar="S",
        type=arguments.seconds,
        default=PATIENCE_S,
        help=f"seconds to keep trying to join the run (default {PATIENCE_S:g})",
    )


def _add_ledger(commands: _Commands) -> None:
    ledger = _add(commands, "ledger", "inspect the trace of a run")
    actions = ledger.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    verify = _add(actions, "verify", "check that no line of a ledger was changed, lost or moved")
    verify.add_argument("path", metavar="PATH", type=Path, help="the file")
    verify.add_argument(
        "--replay",
        action="store_true",
        help="also train again, in this process, and compare the weights after every step",
    )


def _add_watch(commands: _Commands) -> None:
    watch = _add(commands, WATCH, "watch a training whose script doesn't call observe(every=)")
    watch.epilog = (
        "The exit code is the command's own. A finding is raised out of optimizer.step() on every\n"
        "rank, so the training ends as it does after any other error."
    )
    watch.usage = "%(prog)s [--every N] [--contract FILE] -- COMMAND ..."
    watch.add_argument(
        "--every",
        metavar="N",
        type=functools.partial(arguments.natural, least=1),
        default=EVERY,
        help=f"optimizer steps between two looks (default {EVERY})",
    )
    watch.add_argument(
        "--contract",
        metavar="FILE",
        help="a contract, or the name of a shipped one: only its clauses are watched",
    )


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the arguments of `watch` before `--` and the command after it."""
    words = list(arguments)
    if {"-h", "--help"}.intersection(words[: words.index("--") if "--" in words else None]):
        return words, ()
    if "--" not in words or words[-1] == "--":
        raise UsageError(
            f"no command after --; write the command that trains: {PROG} {WATCH} -- torchrun ..."
        )
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _add_doctor(commands: _Commands) -> None:
    doctor = _add(commands, "doctor", "say what this machine has, and which checks it can exercise")
    doctor.add_argument(
        "--clauses", action="store_true", help="list every clause, with what it lacks"
    )
    doctor.add_argument(
        "--json", metavar="FILE", type=Path, help="also write it as JSON, clauses included"
    )
    doctor.add_argument("--no-color", action="store_true", help="no colours")


def _add_finetune(commands: _Commands) -> None:
    _add_training(_add(commands, "finetune", "train a checkpoint on this machine's processes"))
    _add_plan(commands)
    infer = _add(commands, "infer", "answer a prompt with what `finetune` has trained")
    _add_output(infer)
    infer.add_argument("--prompt", metavar="TEXT", required=True, help="the text to answer")
    infer.add_argument(
        "--new-tokens",
        metavar="N",
        type=functools.partial(arguments.natural, least=1),
        help=f"tokens of an answer at most (default {NEW_TOKENS})",
    )
    merge = _add(commands, "merge", "write a model with the adapters added to its weights")
    _add_output(merge)
    merge.add_argument("merged", metavar="MERGED", type=Path, help="a new folder")
    evaluate = _add(commands, "eval", "score what `finetune` has trained on rows")
    _add_output(evaluate)
    evaluate.add_argument(
        "--data", metavar="FILE", type=Path, required=True, help="rows: .jsonl, .json or .parquet"
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("output", metavar="OUT", type=Path, help="the run's output folder")
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python that comes with the checkpoint, as the run did",
    )


def _add_training(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config",
        metavar="CONFIG.yaml",
        type=Path,
        help="what to train, and on what; `init` prints one with all keys",
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint, or from the start if there is none yet",
    )
    command.add_argument(
        "--backend",
        metavar="LIST",
        dest="backends",
        type=_backends,
        default=("cpu",),
        help="what the workers compute on, in turns, e.g. cpu,wgpu or cuda:0,cuda:1; one worker "
        "each at least (default cpu)",
    )
    following.add_options(command)


def _add_plan(commands: _Commands) -> None:
    plan = _add(commands, "plan", "say what a run of `finetune` needs, and which strategy fits")
    plan.add_argument("config", metavar="CONFIG.yaml", type=Path, help="as `finetune` takes it")
    plan.add_argument(
        "--device",
        metavar="D",
        dest="devices",
        action="append",
        default=[],
        help="plan for this device in place of this machine's, as name:memory[:bandwidth], "
        "e.g. rtx4090:24GB or '2 x h100:80GB:25GB/s'; give it once for each kind",
    )
    plan.add_argument(
        "--bandwidth",
        metavar="B",
        default=BANDWIDTH,
        help=f"of links for which no device states one, e.g. 1Gbit or 25GB/s (default {BANDWIDTH})",
    )
    plan.add_argument("--json", metavar="FILE", type=Path, help="also write it as JSON")


def _address(text: str) -> address.Address:
    try:
        return address.parse(text, port_min=1)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _backend(text: str) -> str:
    if text != AUTO:
        try:
            scenario.backend_kind(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(f"{error}, {AUTO}") from error
    return text


def _backends(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        try:
            scenario.backend_kind(name)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= address.PORT_MAX):
        raise argparse.ArgumentTypeError(f"{text!r}: use a port, 1 to {address.PORT_MAX}")
    return int(text)
