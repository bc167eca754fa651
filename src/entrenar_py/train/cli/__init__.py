"""The command `entrenar`: its subcommands, their arguments, and the functions that run them.

This module imports nothing heavy, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import entrenar_py
from entrenar_py.shared import process, scenario
from entrenar_py.shared.errors import (
    CheckpointError,
    ContractError,
    EntrenarError,
    RowsError,
    UsageError,
)
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.finetune import NEW_TOKENS
from entrenar_py.train.model import PRECISIONS
from entrenar_py.train.service import address, exit_codes, metrics, signals

PROG = "entrenar"
AUTO = "auto"
WATCH = "watch"
EVERY = 10
PATIENCE_S = 300.0
OWN_WIRE, WIRE_2 = WIRES = ("own", "v2")
BANDWIDTH = "10Gbit"
DIAGRAMS = ("mermaid", "dot", "svg")
ORDERS = ("given", "best")
DOCTOR = "doctor"  # a value of --workers: this machine's own devices, instead of a file
_TASK = "text"
_PART = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
_HELP_COLUMNS = 98


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


# --- values ---------------------------------------------------------------------------------------


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


def _part(text: str) -> tuple[int, int]:
    """Return K and N of the text `K/N`."""
    match = _PART.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: use K/N with K from 1 to N, such as 2/3")
    return int(match[1]), int(match[2])


def _number(text: str, *, least: float, most: float) -> float:
    """Return a number in the given range."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number from {least:g} to {most:g}")
    return number


_positive = functools.partial(arguments.natural, least=1)


# --- the table ------------------------------------------------------------------------------------

# Option as typed, or name of a positional argument -> the arguments of argparse's `add_argument`.
Arguments = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, its help text, and its arguments or `actions`."""

    name: str
    what: str
    arguments: Arguments = field(default_factory=dict)
    actions: tuple[Command, ...] = ()


def _value(metavar: str, what: str, **more: Any) -> Mapping[str, Any]:
    return {"metavar": metavar, "help": what, **more}


_path = functools.partial(_value, type=Path)


def _flag(what: str) -> Mapping[str, Any]:
    return {"action": "store_true", "help": what}


_RESUME = _flag("continue from the checkpoint, or start if there is none yet")
_JSON = _path("FILE", "also write it as JSON")
_TRAINING: Arguments = {
    "config": _path("CONFIG.yaml", "what to train, and on what; `init` prints one with all keys"),
    "--resume": _RESUME,
    "--backend": _value(
        "LIST",
        "backends, given to the workers in turn, e.g. cpu,wgpu or cuda:0,cuda:1; each is used by "
        "at least one worker (default cpu)",
        dest="backends",
        type=_backends,
        default=("cpu",),
    ),
    **metrics.OPTIONS,
}
_TRAINED: Arguments = {
    "output": _path("OUT", "the run's output folder"),
    "--trust-remote-code": _flag("run Python that comes with the checkpoint, as the run did"),
}
_STUDENT = _path("CONFIG.yaml", "the configuration of a fine-tuning, with the section `distill`")

COORDINATOR = Command(
    name="coordinator",
    what="serve a run to all workers that know its secret",
    arguments={
        "config": _path("CONFIG.yaml", "what to train, and how"),
        "--resume": _RESUME,
        **metrics.OPTIONS,
        "--wire": {
            "choices": WIRES,
            "default": OWN_WIRE,
            "help": "the workers' protocol: own (this package's), or v2, the second layout of the "
            "original system, which has no secret, and in which the workers hold the weights "
            "(default own)",
        },
        "--insecure": _flag(
            "with --wire v2: let any process on other machines that can connect take part"
        ),
    },
)
WORKER = Command(
    name="worker",
    what="compute for a coordinator, which says what to train",
    arguments={
        "--coordinator": _value(
            "HOST:PORT",
            "where the coordinator listens; an IPv6 host in brackets",
            required=True,
            type=_address,
        ),
        "--secret-file": _path("FILE", "the run's shared secret", required=True),
        "--tls-ca": _path("FILE", "connect over TLS, and trust the authorities in this file (PEM)"),
        "--tls-cert": _path("FILE", "the certificate to show the coordinator"),
        "--tls-key": _path("FILE", "the key of --tls-cert"),
        "--backend": _value(
            "NAME",
            "what to compute on: cpu, cuda, wgpu (cuda:1, wgpu:1: the second device), or "
            "auto, the first of cuda, wgpu, cpu that works (default cpu)",
            type=_backend,
            default="cpu",
        ),
        "--model": _path(
            "FOLDER",
            "this machine's copy of the checkpoint that is fine-tuned; its files must have the "
            "hashes of the coordinator's (default: they are fetched and kept)",
        ),
        "--logits": _path(
            "FOLDER",
            "this machine's copy of the teacher's shards; they may still be arriving",
        ),
        "--trust-remote-code": _flag(
            "run Python that comes with the checkpoint, if the coordinator's configuration says "
            "so, too"
        ),
        "--rank": _value(
            "N", "the rank to request (default: the lowest free one)", type=arguments.natural
        ),
        "--id": _value(
            "NAME",
            "in a layer pipeline, this worker's name in the configuration, which gives it a stage",
        ),
        "--listen-port": _value(
            "N",
            "in a mesh or a layer pipeline, the port where other workers connect (default: "
            "any free one)",
            type=_port,
        ),
        "--patience-s": _value(
            "S",
            f"seconds to keep trying to join the run (default {PATIENCE_S:g})",
            type=arguments.seconds,
            default=PATIENCE_S,
        ),
    },
)
LEDGER = Command(
    name="ledger",
    what="inspect the trace of a run",
    actions=(
        Command(
            name="verify",
            what="check that no line of a ledger was changed, lost or moved",
            arguments={
                "path": _path("PATH", "the file"),
                "--replay": _flag(
                    "also train again, in this process, and compare the weights after every step"
                ),
            },
        ),
    ),
)
WATCHING = Command(
    name=WATCH,
    what="watch the training of a script that doesn't call observe(every=)",
    arguments={
        "--every": _value(
            "N",
            f"optimizer steps from one check to the next (default {EVERY})",
            type=_positive,
            default=EVERY,
        ),
        "--contract": _value(
            "FILE", "a contract, or the name of a shipped one: only its clauses are watched"
        ),
    },
)
VISIT = Command(
    name="doctor",
    what="say what this machine has, and which checks it can exercise",
    arguments={
        "--clauses": _flag("list every clause, and what this machine lacks for it"),
        "--json": _path("FILE", "also write it as JSON, clauses included"),
        "--no-color": _flag("no colours"),
    },
)
FINETUNE = (
    Command(
        name="finetune",
        what="train a checkpoint on this machine's processes",
        arguments=_TRAINING,
    ),
    Command(
        name="plan",
        what="say what a run of `finetune` needs, and which strategy fits",
        arguments={
            "config": _path("CONFIG.yaml", "the configuration, as for `finetune`"),
            "--device": _value(
                "D",
                "plan for this device instead of this machine's, as "
                "name:memory[:bandwidth], e.g. rtx4090:24GB or '2 x h100:80GB:25GB/s'; "
                "give it once for each kind",
                dest="devices",
                action="append",
                default=[],
            ),
            "--bandwidth": _value(
                "B",
                "bandwidth of links for which no device states one, e.g. 1Gbit or 25GB/s "
                f"(default {BANDWIDTH})",
                default=BANDWIDTH,
            ),
            "--json": _JSON,
        },
    ),
    Command(
        name="infer",
        what="answer a prompt with a model that `finetune` trained",
        arguments={
            **_TRAINED,
            "--prompt": _value("TEXT", "the text to answer"),
            "--prompts": _path(
                "FILE", "file of rows to answer instead; a line of JSON is printed for each"
            ),
            "--new-tokens": _value(
                "N", f"largest number of tokens in an answer (default {NEW_TOKENS})", type=_positive
            ),
            "--temperature": _value(
                "T",
                "sampling temperature; 0 takes the most likely token (default 0)",
                type=functools.partial(_number, least=0, most=10),
            ),
            "--top-p": _value(
                "P",
                "sample from the most likely tokens with this probability together (default 1)",
                type=functools.partial(_number, least=0, most=1),
            ),
            "--seed": _value("N", "seed of sampling (default 0)", type=arguments.natural),
        },
    ),
    Command(
        name="merge",
        what="write a model with the adapters added to its weights",
        arguments={
            **_TRAINED,
            "merged": _path("MERGED", "new folder for the model"),
            "--precision": _value(
                "TYPE",
                "number format of the weights: float32 (default), or bfloat16, which rounds them",
                choices=PRECISIONS,
                default="float32",
            ),
        },
    ),
    Command(
        name="eval",
        what="score a model that `finetune` trained, on rows",
        arguments={
            **_TRAINED,
            "--data": _path("FILE", "file of rows: .jsonl, .json or .parquet", required=True),
        },
    ),
)
PIPELINE = Command(
    name="pipeline",
    what="plan or convert the stages of a layer pipeline",
    actions=(
        Command(
            name="plan",
            what="show the stages of a configuration, or find the fastest cut",
            arguments={
                "config": _path("CONFIG.yaml", "the configuration, as for `coordinator`"),
                "--workers": _value(
                    "FILE",
                    "a list of {worker, memory, backend, flops or seconds_per_block, "
                    f"bandwidth}}; or {DOCTOR}: this machine's devices, measured (default: "
                    "`devices` of the configuration)",
                ),
                "--order": {
                    "choices": ORDERS,
                    "default": ORDERS[0],
                    "help": "assign stages to workers in the given order, or in the fastest order, "
                    "for at most six workers (default given)",
                },
                "--bandwidth": _value(
                    "B",
                    "bandwidth of the coordinator's link, and of workers that state none, e.g. "
                    f"1Gbit (default {BANDWIDTH})",
                    default=BANDWIDTH,
                ),
                "--diagram": {
                    "choices": DIAGRAMS,
                    "help": "print a diagram of machines and links instead, in this form",
                },
                "--json": _JSON,
            },
        ),
        Command(
            name="import",
            what="print a configuration that is made from an earlier framework's "
            "hetero_config.json",
            arguments={
                "old": _path("OLD.json", "the hetero_config.json"),
                "--model": _path("FOLDER", "folder with the checkpoint; its blocks are counted"),
                "--data": _path(
                    "FILE", "rows to train on (default train.jsonl)", default=Path("train.jsonl")
                ),
                "--output": _path(
                    "FOLDER", "folder for the trained weights (default out)", default=Path("out")
                ),
                "--secret-file": _path(
                    "FILE", "the run's shared secret (default secret)", default=Path("secret")
                ),
                "--task": {
                    "choices": ("instruct", "text"),
                    "default": _TASK,
                    "help": f"the task to train for (default {_TASK})",
                },
            },
        ),
    ),
)
DISTILL = Command(
    name="distill",
    what="distil a teacher: write its logits once, in shards, then train a student on them",
    actions=(
        Command(
            name="logits",
            what="run the teacher over all rows, and keep its most likely tokens",
            arguments={
                "config": _STUDENT,
                "--backend": _value(
                    "NAME",
                    "what the teacher computes on: cpu or cuda (cuda:1: the second device; "
                    "default cpu)",
                    type=_backend,
                    default="cpu",
                ),
                "--part": _value(
                    "K/N",
                    "make every N-th shard, from the K-th on, for machines without a common "
                    "folder; machines with a common folder share the work without this option",
                    type=_part,
                ),
            },
        ),
        Command(
            name="train",
            what="train the student on this machine; shards may still be arriving",
            arguments={
                **_TRAINING,
                "--follow": {
                    "action": argparse.BooleanOptionalAction,
                    "help": "wait for shards that are missing, or end with an error at the first "
                    "one (default: as distill.wait_s says)",
                },
            },
        ),
        Command(
            name="text",
            what="let the teacher answer prompts, for a student with a different tokenizer",
            arguments={
                "config": _STUDENT,
                "--endpoint": _value(
                    "URL",
                    "base URL of an OpenAI-compatible server that answers, such as "
                    "http://host:8000/v1 (default: distill.text.endpoint, or without one "
                    "distill.teacher is run here)",
                ),
                "--backend": _value(
                    "NAME",
                    "what the teacher computes on without an endpoint: cpu or cuda (cuda:1: "
                    "the second device; default cpu)",
                    type=_backend,
                ),
            },
        ),
        Command(
            name="status",
            what="list the shards that exist, are missing or are damaged",
            arguments={"folder": _path("DIR", "the folder of the shards"), "--json": _JSON},
        ),
    ),
)
COMMANDS = (COORDINATOR, WORKER, LEDGER, WATCHING, VISIT, *FINETUNE, PIPELINE, DISTILL)


# --- the parser -----------------------------------------------------------------------------------

# The arguments of all parsers.
_FORM: Mapping[str, Any] = {
    "formatter_class": functools.partial(
        argparse.RawDescriptionHelpFormatter, max_help_position=26
    ),
    "allow_abbrev": False,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with every command and option."""
    what = "Trains and fine-tunes on one machine or several, with workers that come and go."
    cli = _Parser(prog=PROG, description=what, epilog=_epilog(), **_FORM)
    cli.add_argument("--version", action="version", version=f"%(prog)s {entrenar_py.__version__}")
    _add(cli, COMMANDS, title="commands", dest="command")
    watch = next(command for command in _parsers(cli) if command.prog == f"{PROG} {WATCH}")
    watch.usage = "%(prog)s [--every N] [--contract FILE] -- COMMAND ..."
    watch.epilog = (
        "The exit code is the command's own. A finding is raised by "
        "optimizer.step() on every\nrank, so the training ends as it does after "
        "any other error."
    )
    return cli


def _add(
    above: argparse.ArgumentParser, commands: Sequence[Command], *, title: str, dest: str
) -> None:
    group = above.add_subparsers(title=title, dest=dest, metavar=dest.upper(), required=True)
    for command in commands:
        sentence = f"{command.what[0].upper()}{command.what[1:]}."
        own = group.add_parser(command.name, help=command.what, description=sentence, **_FORM)
        own.epilog = _epilog(own.prog.removeprefix(f"{PROG} "))
        for name, settings in command.arguments.items():
            own.add_argument(name, **settings)
        if command.actions:
            _add(own, command.actions, title="actions", dest="action")


def _parsers(cli: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of commands."""
    for action in cli._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _epilog(command: str = "") -> str:
    lines = ["exit codes:"]
    for code, meaning in exit_codes.of_command(command).items():
        lines += textwrap.wrap(
            meaning, _HELP_COLUMNS, initial_indent=f"  {code}  ", subsequent_indent=" " * 5
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, including `command`. Raises UsageError if they are invalid."""
    program: Sequence[str] = ()
    if list(arguments[:1]) == [WATCH]:
        arguments, program = _split(arguments)
    parsed = parser().parse_args(arguments)
    parsed.program = list(program)
    if parsed.command == "worker" and parsed.tls_ca is None and (parsed.tls_cert or parsed.tls_key):
        raise UsageError(
            "--tls-cert and --tls-key need --tls-ca, the authority that signed the "
            "coordinator's certificate; give all three"
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
            f"--tensorboard with --wire {WIRE_2}: its coordinator writes only `metrics`; leave "
            "--tensorboard out"
        )
    if parsed.wire == WIRE_2 and parsed.halt_on_spike:
        raise UsageError(
            f"--halt-on-spike with --wire {WIRE_2}: its workers have no message that halts them; "
            "leave --halt-on-spike out"
        )
    if parsed.wire != WIRE_2 and parsed.insecure:
        raise UsageError(
            f"--insecure: it is only for --wire {WIRE_2}; workers of this package prove a secret"
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


# --- entry points ---------------------------------------------------------------------------------

Others = Mapping[str, Callable[[argparse.Namespace], int]]


def main(argv: Sequence[str] | None, others: Others) -> int:
    """Run the command and return its exit code. `--help` and `--version` raise SystemExit.

    `others` has functions for the commands that don't belong to the trainer, by name.
    """
    if argv is None:
        process.begin()
    signals.interrupt()
    try:
        code = _run(parse(sys.argv[1:] if argv is None else argv), others)
        return exit_codes.FAILED if printing.lost() and code == exit_codes.DONE else code
    except SystemExit as left:  # --help, --version
        if printing.lost():
            raise SystemExit(exit_codes.FAILED) from left
        raise
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:  # noqa: BLE001  (Python would exit with 1, which means a failed run)
        # A library may have replaced an interrupt by its own exception.
        return _interrupted() if signals.noted() else _failed(error)
    finally:
        signals.settle()


def _interrupted() -> int:
    signals.settle()
    printing.warn(signals.say_interrupted())
    return exit_codes.STOPPED


def _failed(error: Exception) -> int:
    """Print the error; return the exit code."""
    match error:
        case ContractError():  # its lines start with file:line:column
            printing.warn_lines(str(error))
            return exit_codes.INVALID
        case RowsError():
            printing.warn_lines(f"{PROG}: {error}")
            return exit_codes.INVALID
        case UsageError() | CheckpointError():
            _say(error)
            return exit_codes.INVALID
        case EntrenarError():
            _say(error)
            return exit_codes.FAILED
    printing.warn_lines("".join(traceback.format_exception(error)).rstrip())
    _say(f"this is a bug in {PROG}: report it, with the lines above")
    return exit_codes.FAILED


def _run(parsed: argparse.Namespace, others: Others) -> int:
    """Run the chosen command. Heavy modules are imported only here, so that `--help` is fast."""
    if parsed.command in others:
        return others[parsed.command](parsed)
    if parsed.command == "coordinator" and parsed.wire == WIRE_2:
        from entrenar_py.train.service import averaging

        return averaging.run(parsed.config, insecure=parsed.insecure)
    if parsed.command == "coordinator":
        from entrenar_py.train.finetune import own_models, serving

        serve = serving.run if serving.is_finetuning(parsed.config) else own_models.run
        return serve(
            parsed.config,
            resume=parsed.resume,
            halt_on_spike=parsed.halt_on_spike,
            tensorboard=parsed.tensorboard,
        )
    if parsed.command == "worker":
        from entrenar_py.train.finetune import joining
        from entrenar_py.train.service import worker

        return worker.run(parsed, joining.obtain)
    if parsed.command != "ledger":
        from entrenar_py.train.finetune import cli

        return {"pipeline": cli.pipeline, "distill": cli.distill}.get(parsed.command, cli.run)(
            parsed
        )
    from entrenar_py.train.service import ledger_account

    return ledger_account.verify(parsed.path, replay=parsed.replay)


def _say(message: object) -> None:
    printing.warn(f"{PROG}: {message}")
