"""`entrenar plan`: prints a run's needs and the strategy to use, and writes them as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.model import preparation
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.plan import devices as device_texts
from entrenar_py.train.plan import plan
from entrenar_py.train.plan.devices import Device, seconds, short, size
from entrenar_py.train.plan.plan import Option, Run, Worker
from entrenar_py.train.plan.shape import FLOAT_BYTES

COLUMNS = 98
_GAP = "  "


def lines(
    run: Run,
    options: Sequence[Option],
    chosen: Option | None,
    reason: str,
    *,
    length_from: str,
    num_samples: int | None,
) -> Iterator[str]:
    """Yield the plan: the model, each worker's memory, each strategy's traffic, and the choice."""
    yield from step_lines(run, length_from, "micro-batches")
    yield f"compile  {preparation.compilation(run.settings, num_samples)}"
    yield from _devices(run)
    yield ""
    yield "bytes of a worker, each part at its largest; +: with recomputed blocks (recompute)"
    yield from columns(_MEMORY, list(_memory_rows(options)))
    yield ""
    yield f"a step on the wire, at {size(run.link)}/s"
    yield from columns(_WIRE, list(_wire_rows(run, options)))
    yield ""
    yield f"use: {chosen.strategy if chosen else 'none'}"
    yield from textwrap.wrap(reason, COLUMNS, initial_indent="why: ", subsequent_indent="     ")


def step_lines(run: Run, length_from: str, parts: str) -> Iterator[str]:
    """Yield the model, the number of trained elements, and how a step is cut into `parts`."""
    counts, config = run.shape.counts(), run.shape.config
    number = run.shape.num_parameters
    gradient = size(FLOAT_BYTES * counts.trained)
    training = run.settings.training
    yield f"model    {config.model_type}: {number:,} parameters, {run.shape.num_blocks} blocks"
    yield f"trained  {counts.trained:,} by {run.settings.method}, {gradient} a gradient"
    yield (
        f"step     {training.batch_size} rows in {training.num_shards} {parts} of "
        f"{run.rows} x {run.length} tokens ({length_from})"
    )


def _devices(run: Run) -> Iterator[str]:
    for device, count in Counter(run.devices).items():
        times = f"{count} x " if count > 1 else ""
        room = "reports no memory" if device.memory is None else size(device.memory)
        yield f"device   {times}{device.name}: {room}"


_MEMORY = (
    *("strategy", "weights", "trained", "grads", "moments"),
    *("kept", "kept+", "peak", "peak+", "fits", "fits+"),
)
_WIRE = "strategy", "a worker sends", "receives", "busiest link", "time"


def _memory_rows(found: Sequence[Option]) -> Iterator[tuple[str, ...]]:
    for option in found:
        if option.problem:
            yield (option.strategy, option.problem)
            continue
        kinds = dict[tuple[object, ...], Worker]()
        for worker in option.workers:
            kinds.setdefault((worker.device, worker.sharing), worker)
        for worker in kinds.values():
            place = f" {worker.device.name.split()[0]:.16}" if len(kinds) > 1 else ""
            yield (f"{option.strategy}{place}", *_parts(worker))


def _parts(worker: Worker) -> Iterator[str]:
    plain, again = worker.memory, worker.recomputed
    yield from map(short, (plain.weights, plain.trained, plain.gradients, plain.optimizer))
    yield from map(short, (plain.activations, again.activations, plain.peak, again.peak))
    for recompute in (False, True):
        yield {True: "yes", False: "no", None: "?"}[worker.fits(recompute=recompute)]


def _wire_rows(run: Run, found: Sequence[Option]) -> Iterator[tuple[str, ...]]:
    for option in found:
        if not option.problem:
            moved = option.traffic
            sizes = (size(one) for one in (moved.sent, moved.received, moved.busiest))
            yield (option.strategy, *sizes, seconds(moved.seconds(run.link)))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table. The first column is aligned left, all others right.

    A row with too few cells is a remark.
    """
    whole = [row for row in (head, *rows) if len(row) == len(head)]
    widths = [max(len(row[place]) for row in whole) for place in range(len(head))]
    first = max([widths[0], *(len(row[0]) for row in rows)])
    for row in (head, *rows):
        if len(row) < len(head):
            yield _GAP.join([row[0].ljust(first), *row[1:]])[:COLUMNS]
            continue
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield _GAP.join([row[0].ljust(first), *cells])


def show(
    settings: Settings,
    *,
    longest: int | None,
    num_samples: int | None,
    devices: Sequence[Device],
    bandwidth: str,
    json: Path | None,
) -> bool:
    """Print the plan of a run; return whether some strategy fits.

    `longest` is the number of tokens of the longest of `num_samples` rows. Both are None if rows
    were not read. Raises
    UsageError if `bandwidth` can't be parsed, or if the file can't be written.
    """
    if json is not None:
        arguments.require_writable(json, "json")
    run = plan.of(
        settings,
        devices,
        longest=longest,
        bandwidth=device_texts.bandwidth_of(bandwidth),
    )
    options = plan.options(run)
    chosen = plan.choose(run, options)
    reason = plan.reason(run, options, chosen)
    length_from = "data.max_tokens" if longest is None else "the longest row"
    told = lines(*(run, options, chosen, reason), length_from=length_from, num_samples=num_samples)
    printing.say_lines("\n".join(told))
    if json is not None:
        arguments.write_file(plan.to_record(run, options, chosen, reason), json)
    return chosen is not None


def of_run(settings: Settings, described: Sequence[str] = ()) -> list[Device]:
    """Return the devices to plan for: `described`, else the configuration's, else this machine's.

    Of this machine, only one kind of device is returned: CUDA GPUs if there are any, else other
    adapters, else the CPU. Raises UsageError if a description can't be parsed or if no device
    works.
    """
    texts = described or settings.devices
    if texts:
        return device_texts.described(texts)
    found = device_texts.found()
    for kind in ("cuda", "wgpu", "cpu"):
        alike = [one for one in found if one.kind == kind]
        if alike:
            return alike
    raise UsageError("this machine has no device that works; describe one with --device")
