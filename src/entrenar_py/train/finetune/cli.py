"""The commands `finetune`, `plan`, `infer`, `merge` and `eval` of `entrenar`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from entrenar_py.shared.untrusted import printing
from entrenar_py.train.finetune import settings_file, staffing
from entrenar_py.train.service import exit_codes

_LOADING = "loads torch and transformers, which takes some seconds"


def run(given: argparse.Namespace) -> int:
    """Run one of them; return the exit code. Raises UsageError and ContractError."""
    if given.command == "finetune":
        if given.config == Path("init"):
            from entrenar_py.train.finetune import settings_text

            printing.say_lines(settings_text.template().rstrip())
            return exit_codes.DONE
        settings_file.load(given.config)  # a slip is told before torch is loaded
        _tell_loading()
        staffing.load_ahead(given.backends)
        from entrenar_py.train.finetune import local

        return local.train(
            given.config,
            resume=given.resume,
            names=given.backends,
            halt_on_spike=given.halt_on_spike,
            tensorboard=given.tensorboard,
        )
    if given.command == "plan":
        settings_file.load(given.config)
    _tell_loading()
    if given.command == "plan":
        return _plan(given)
    from entrenar_py.train.finetune import outputs, rows_read

    output = outputs.load(given.output, trusts=given.trust_remote_code)
    if given.command == "infer":
        for line in outputs.answer(output, given.prompt, new_tokens=given.new_tokens):
            printing.say_lines(line)
    elif given.command == "eval":
        for line in outputs.evaluate(output, given.data).lines():
            printing.say(line)
    else:
        outputs.merge(output, given.merged)
        narrow = {"qlora": "NF4"}.get(output.settings.method, output.settings.precision)
        if narrow != "float32":
            printing.say(
                f"{narrow} weights became float32, of the same values: the model is larger"
            )
        printing.say(f"written to {given.merged}")
    rows_read.say_warnings()
    return exit_codes.DONE


def pipeline(given: argparse.Namespace) -> int:
    """Run an action of `entrenar pipeline`; return the exit code. Raises as `run` does."""
    if given.action == "plan":
        settings_file.load(given.config)
    _tell_loading()
    from entrenar_py.train.finetune import pipeline_commands

    return (pipeline_commands.plan if given.action == "plan" else pipeline_commands.convert)(given)


def distill(given: argparse.Namespace) -> int:
    """Run an action of `entrenar distill`; return the exit code. Raises as `run` does."""
    if given.action != "status":
        settings_file.load(given.config)
    _tell_loading()
    if given.action == "train":
        staffing.load_ahead(given.backends)
    from entrenar_py.train.finetune import distill_commands, distill_text

    actions = {
        "logits": distill_commands.logits,
        "train": distill_commands.train,
        "text": distill_text.run,
        "status": distill_commands.look,
    }
    return actions[given.action](given)


def _tell_loading() -> None:
    """Tell a person at a terminal why nothing comes yet."""
    if sys.stderr.isatty():
        printing.warn(_LOADING)


def _plan(given: argparse.Namespace) -> int:
    """Print a plan; the configuration is invalid for devices on which nothing fits."""
    from entrenar_py.train.finetune import foresight, remarks, stage_problems
    from entrenar_py.train.model.hyper_parameters import Facts
    from entrenar_py.train.plan import text
    from entrenar_py.train.plan.shape import Shape

    settings = settings_file.load(given.config)
    stage_problems.require_other(settings, given.config, "entrenar plan")
    rows, longest = foresight.rows_and_longest(settings)
    devices = text.of_run(settings, given.devices)
    if not given.devices and not settings.devices:
        settings = foresight.planned(settings, devices, longest=longest)
    number = Shape(settings).num_parameters
    remarks.show(given.config, Facts(settings=settings, num_parameters=number, rows=rows))
    fits = text.show(
        settings,
        longest=longest,
        devices=devices,
        bandwidth=given.bandwidth,
        json=given.json,
    )
    return exit_codes.DONE if fits else exit_codes.INVALID
