"""The commands of `entrenar` that fine-tune, and the command line of a torchrun rank.

Nothing here imports torch at the top: a mistake in a configuration is reported at once, and each
command imports what it needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrenar_py.shared.errors import (
    CheckpointError,
    ContractError,
    EntrenarError,
    RowsError,
    UsageError,
)
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.finetune import settings_file, settings_forms, staffing
from entrenar_py.train.service import exit_codes, metrics

_LOADING = "loads torch and transformers, which takes some seconds"


def run(arguments: argparse.Namespace) -> int:
    """Run one of these commands; return the exit code. Raises UsageError and ContractError."""
    if arguments.command == "finetune":
        if arguments.config == Path("init"):
            printing.say_lines(settings_forms.template().rstrip())
            return exit_codes.DONE
        settings_file.load(arguments.config)  # a mistake is reported before torch is loaded
        _tell_loading()
        staffing.load_ahead(arguments.backends)
        from entrenar_py.train.finetune import local

        return local.train(
            arguments.config,
            resume=arguments.resume,
            names=arguments.backends,
            halt_on_spike=arguments.halt_on_spike,
            tensorboard=arguments.tensorboard,
        )
    if arguments.command == "plan":
        settings_file.load(arguments.config)
    if arguments.command == "infer" and (arguments.prompt is None) == (arguments.prompts is None):
        raise UsageError("infer: give either --prompt TEXT or --prompts FILE")
    _tell_loading()
    if arguments.command == "plan":
        return _plan(arguments)
    from entrenar_py.train.finetune import foresight, outputs

    output = outputs.load(arguments.output, trusts=arguments.trust_remote_code)
    if arguments.command == "infer":
        sampling = outputs.sampling_of(output, arguments)
        if arguments.prompts is None:
            lines = outputs.answer(output, arguments.prompt, sampling)
        else:
            lines = outputs.answers(output, arguments.prompts, sampling)
        for line in lines:
            printing.say_lines(line)
    elif arguments.command == "eval":
        for line in outputs.evaluate(output, arguments.data).lines():
            printing.say(line)
    else:
        outputs.merge(output, arguments.merged, dtype=arguments.precision)
        narrow = {"qlora": "NF4"}.get(output.settings.method, output.settings.precision)
        if arguments.precision != "float32":
            printing.say(
                f"weights were rounded to {arguments.precision}, which may undo small changes: "
                f"compare its answers with those of `entrenar infer {arguments.output}`, or merge "
                "without --precision"
            )
        elif narrow != "float32":
            printing.say(
                f"{narrow} weights became float32, of the same values: the model is larger"
            )
        printing.say(f"written to {arguments.merged}")
    foresight.say_warnings()
    return exit_codes.DONE


def pipeline(arguments: argparse.Namespace) -> int:
    """Run an action of `entrenar pipeline`; return the exit code. Raises as `run` does."""
    if arguments.action == "plan":
        settings_file.load(arguments.config)
    _tell_loading()
    from entrenar_py.train.finetune import pipeline_commands

    is_plan = arguments.action == "plan"
    return (pipeline_commands.plan if is_plan else pipeline_commands.convert)(arguments)


def distill(arguments: argparse.Namespace) -> int:
    """Run an action of `entrenar distill`; return the exit code. Raises as `run` does."""
    if arguments.action != "status":
        settings_file.load(arguments.config)
    _tell_loading()
    if arguments.action == "train":
        staffing.load_ahead(arguments.backends)
    from entrenar_py.train.finetune import distill_commands

    actions = {
        "logits": distill_commands.logits,
        "train": distill_commands.train,
        "text": distill_commands.text,
        "status": distill_commands.look,
    }
    return actions[arguments.action](arguments)


def _tell_loading() -> None:
    if sys.stderr.isatty():
        printing.warn(_LOADING)


def _plan(arguments: argparse.Namespace) -> int:
    """Print a plan; return the exit code, INVALID if nothing fits on the devices."""
    from entrenar_py.train.finetune import foresight
    from entrenar_py.train.model.hyper_parameters import Facts
    from entrenar_py.train.plan import text
    from entrenar_py.train.plan.shape import Shape

    settings = settings_file.load(arguments.config)
    settings_file.require_other(settings, arguments.config, "entrenar plan")
    rows, longest = foresight.rows_and_longest(settings)
    devices = text.of_run(settings, arguments.devices)
    if not arguments.devices and not settings.devices:
        settings = foresight.planned(settings, devices, longest=longest)
    number = Shape(settings).num_parameters
    facts = Facts(settings=settings, num_parameters=number, rows=rows)
    foresight.show_remarks(arguments.config, facts)
    fits = text.show(
        settings,
        longest=longest,
        num_samples=None if rows is None else rows.num_samples,
        devices=devices,
        bandwidth=arguments.bandwidth,
        json=arguments.json,
    )
    return exit_codes.DONE if fits else exit_codes.INVALID


PROG = "entrenar_py.finetune"


def rank(argv: Sequence[str], environment: Mapping[str, str], init_method: str = "env://") -> int:
    """Train as the rank that `environment` describes; return the exit code.

    Rank 0 prints errors; elastic ranks print their own. Those that occur before ranks have joined
    are printed by the first rank of each host.
    """
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns about intended settings
    is_first = environment.get("RANK", "0") == "0"
    try:
        from entrenar_py.train.finetune.strategies import launch  # brings torch

        here = launch.world(environment)
        is_elastic = launch.is_elastic(arguments.config)
    except EntrenarError as error:  # on this host only; the other hosts wait for it
        if environment.get("LOCAL_RANK", "0") == "0":
            _tell(error)
        return _code(error)
    options = {
        "resume": arguments.resume,
        "halt_on_spike": arguments.halt_on_spike,
        "tensorboard": arguments.tensorboard,
    }
    try:
        if is_elastic:
            return launch.train_elastically(arguments.config, here, **options)
        with launch.joined(here, init_method):
            return launch.train(arguments.config, here, **options)
    except EntrenarError as error:
        if is_first or is_elastic:  # an elastic rank may be the only one with this problem
            _tell(error)
        return _code(error)


def _code(error: EntrenarError) -> int:
    is_invalid = isinstance(error, ContractError | UsageError | CheckpointError)
    return exit_codes.INVALID if is_invalid else exit_codes.FAILED


def _tell(error: EntrenarError) -> None:
    if isinstance(error, ContractError):  # its lines start with file:line:column
        printing.warn_lines(str(error))
    elif isinstance(error, RowsError):
        printing.warn_lines(f"entrenar: {error}")
    else:
        printing.warn(f"entrenar: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"torchrun ... -m {PROG}",
        description="Fine-tune by ranks that torchrun starts; the configuration has a strategy.",
    )
    parser.add_argument("config", type=Path, metavar="RUN.yaml", help="the configuration")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in the output folder"
    )
    for name, option in metrics.OPTIONS.items():
        parser.add_argument(name, **option)
    return parser
