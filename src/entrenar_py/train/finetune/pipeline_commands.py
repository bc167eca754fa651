"""`entrenar pipeline`: plans stages, or converts a configuration of an earlier framework."""

from __future__ import annotations

import argparse
from pathlib import Path

from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.finetune import foresight, settings_file
from entrenar_py.train.model import model_folder
from entrenar_py.train.model.settings import LAYER_PIPELINE, Data, Settings
from entrenar_py.train.plan import devices, old_configuration, stage_plan, stage_text, stage_workers
from entrenar_py.train.plan import plan as planning
from entrenar_py.train.plan.stage_costs import StageCosts
from entrenar_py.train.plan.stage_plan import StagesPlan
from entrenar_py.train.plan.stage_workers import StageWorker
from entrenar_py.train.service import exit_codes

_DOCTOR = "doctor"
_WORTH = 0.99  # a different order is suggested if its slowest stage takes less than this fraction


def plan(options: argparse.Namespace) -> int:
    """Print the stages of a configuration, or the best ones; return the exit code.

    Raises ContractError and UsageError for invalid input, and for stages that don't fit.
    """
    if options.json is not None:
        arguments.require_writable(options.json, "json")
    costs, longest = _costs(options)
    workers = _workers(options, costs)
    try:
        stages = _plan(options, costs, workers)
        stage_plan.require_fits(stages)
    except UsageError as error:
        _at_its_line(options.config, error)
        raise
    if options.diagram is not None:
        printing.say_lines(stage_text.draw(stages, options.diagram))
    else:
        length_from = "data.max_tokens" if longest is None else "the longest row"
        printing.say_lines("\n".join(stage_text.lines(stages, length_from=length_from)))
        _tell_order(options, costs, workers, stages)
        if not costs.run.settings.stages:
            printing.say_lines("\n".join(["", *stage_text.section(stages.plan())]))
    if options.json is not None:
        arguments.write_file(stage_text.to_record(stages), options.json)
    return exit_codes.DONE


def _costs(options: argparse.Namespace) -> tuple[StageCosts, int | None]:
    """Return the costs of the configuration's model, and the longest row's number of tokens."""
    settings = settings_file.load(options.config)
    if settings.strategy != LAYER_PIPELINE:
        strategy = settings.strategy or "no strategy"
        raise UsageError(
            f"{options.config}: {strategy}: stages belong to strategy: "
            f"{LAYER_PIPELINE}; set it, or use `entrenar plan {options.config}`"
        )
    _, longest = foresight.rows_and_longest(settings)
    run = planning.of(
        settings,
        devices.described(settings.devices),
        longest=longest,
        bandwidth=devices.bandwidth_of(options.bandwidth),
    )
    return StageCosts(run), longest


def _workers(options: argparse.Namespace, costs: StageCosts) -> list[StageWorker]:
    """Return the workers to plan for; an empty list if only stages are known."""
    settings = costs.run.settings
    if options.workers == _DOCTOR:
        return stage_workers.measured(costs.run, printing.warn)
    if options.workers is not None:
        return stage_workers.load(Path(options.workers))
    if costs.run.devices:
        workers = stage_workers.of_devices(costs.run.devices)
        named = {name for stage in settings.stages for name in stage.worker}
        if not named or named & {worker.name for worker in workers}:
            return workers
        printing.warn("devices: not used, since stages name other workers; see --workers FILE")
    return [] if settings.stages else stage_workers.nameless(settings.num_workers)


def _plan(options: argparse.Namespace, costs: StageCosts, workers: list[StageWorker]) -> StagesPlan:
    if costs.run.settings.stages:
        return stage_plan.of_settings(costs, workers)
    if options.order == "best":
        stages = stage_plan.faster_order(costs, workers)
        if stages is not None:
            return stages
        if len(workers) > stage_plan.ORDERS_OF_MAX:
            raise UsageError(
                f"--order best with {len(workers)} workers: it tries all orders of at most "
                f"{stage_plan.ORDERS_OF_MAX} workers; leave it out, and give the workers in "
                "the right order"
            )
    return stage_plan.propose(costs, workers)


def _tell_order(
    options: argparse.Namespace, costs: StageCosts, workers: list[StageWorker], stages: StagesPlan
) -> None:
    """Print a hint if a different order of the workers is faster."""
    if costs.run.settings.stages or options.order == "best":
        return
    other = stage_plan.faster_order(costs, workers)
    if other is not None and other.slowest < _WORTH * stages.slowest:
        names = ", ".join(stage.workers[0].name or "any" for stage in other.stages)
        share = 100 * (1 - other.slowest / stages.slowest)
        printing.say_lines(
            f"order    in the order {names} the slowest stage takes {share:.0f} % less time: "
            "use --order best"
        )


def _at_its_line(path: Path, error: UsageError) -> None:
    """Raise `error` with the line of the field that it is about; return if it names no field."""
    problems = Problems()
    root = settings_file.read(path, problems)
    if error.field and root is not None:
        at = settings_file.innermost(root, error.field.split(".")).at
        problems.error(at, str(error))
        problems.settle(strict=True)


def convert(options: argparse.Namespace) -> int:
    """Print a configuration converted from an earlier framework's; return the exit code.

    Raises ContractError with each line that can't be converted, and UsageError for a missing model.
    """
    num_blocks = None
    if options.model is None:
        printing.warn("no --model: its number of blocks is not compared; set model in the output")
    else:
        run = Settings(
            model=options.model,
            task=options.task,
            output=options.output,
            data=Data(train=options.data),
        )
        num_blocks = int(model_folder.configuration(run).get_text_config().num_hidden_layers)
    old = old_configuration.load(options.old, num_blocks)
    lines = old_configuration.lines(
        old,
        source=options.old,
        model=options.model or Path("path/to/checkpoint"),
        task=options.task,
        data=options.data,
        output=options.output,
        secret=options.secret_file,
    )
    printing.say_lines("\n".join(lines))
    return exit_codes.DONE
