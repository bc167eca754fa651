"""The workers that stages are planned for: from a file, from `devices`, or measured here.

A file has a list of {worker, memory, backend, flops or seconds_per_block, bandwidth}.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import ListNode, MapNode, ScalarNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import blocks, precision
from entrenar_py.train.model import model as models
from entrenar_py.train.model.masks import Masks, recompute
from entrenar_py.train.model.settings import KINDS
from entrenar_py.train.plan import devices
from entrenar_py.train.plan.devices import Device, seconds
from entrenar_py.train.plan.plan import Run

FORM = "workers are a list of mappings (worker, memory, backend, flops, bandwidth)"
_KEYS = ("worker", "memory", "backend", "flops", "seconds_per_block", "bandwidth")
_SPEEDS = ("flops", "seconds_per_block")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageWorker:
    """A worker on a device of `kind` with `memory` bytes, None if that is not known.

    Its speed is `flops` (operations per second), or `seconds_per_block` (one shard, forward and
    backward), or unknown. `bandwidth` is the speed of its link, in bytes per second.
    """

    name: str
    kind: str
    memory: int | None = None
    flops: float | None = None
    seconds_per_block: float | None = None
    bandwidth: float | None = None

    @property
    def has_speed(self) -> bool:
        """True if the worker's speed is known."""
        return self.flops is not None or self.seconds_per_block is not None

    def speed(self, block_work: float) -> float:
        """Return the worker's operations per second if a block takes `block_work` operations.

        Without a known speed, returns `block_work`, so that the worker's times are in blocks.
        """
        if self.flops is not None:
            return self.flops
        return block_work / (self.seconds_per_block or 1.0)


def load(path: Path) -> list[StageWorker]:
    """Return the workers in the file at `path`. Raises ContractError with all problems."""
    problems = Problems()
    data = composer.read(path, problems)
    root = None
    if data is not None:
        root = composer.compose_list(data, str(path), problems, form=FORM)
    found = [] if root is None else list(_read(root, problems))
    problems.settle(strict=True)
    return found


def of_devices(described: Sequence[Device]) -> list[StageWorker]:
    """Return one worker for each device. Devices with the same name get numbers."""
    times, so_far = Counter(device.name for device in described), Counter[str]()
    workers = []
    for device in described:
        so_far[device.name] += 1
        number = f"-{so_far[device.name]}" if times[device.name] > 1 else ""
        workers.append(
            StageWorker(
                name=f"{device.name}{number}",
                kind=device.kind,
                memory=device.memory,
                bandwidth=device.bandwidth,
            )
        )
    return workers


def nameless(number: int) -> list[StageWorker]:
    """Return `number` workers on the CPU without a name, a speed or a known memory."""
    return [StageWorker(name="", kind="cpu")] * number


def _read(root: ListNode, problems: Problems) -> Iterator[StageWorker]:
    lines = dict[str, int]()
    if not root.items:
        problems.error(root.at, "the list is empty: give a worker for each stage")
    for index, item in enumerate(root.items):
        if not isinstance(item, MapNode):
            problems.error(item.at, f"workers[{index}]: use a mapping with {', '.join(_KEYS)}")
            continue
        record = Record(item, what=f"workers[{index}]", known=_KEYS, problems=problems)
        record.warn_unread()
        worker = _worker(record)
        if worker.name in lines:
            record.error(
                "worker", f"worker={worker.name}: line {lines[worker.name]} has it; name each once"
            )
        if worker.name:
            lines.setdefault(worker.name, item.at.line)
        yield worker
    _require_all_speeds(root, problems)


def _worker(record: Record) -> StageWorker:
    """Return a worker. Invalid values are reported as problems and left out."""
    if all(record.present(key) for key in _SPEEDS):
        record.error("seconds_per_block", "flops and seconds_per_block: give one")
    kind = _text(record, "backend")
    if kind and kind not in KINDS:
        record.error("backend", f"backend={kind!r}: use {' or '.join(KINDS)}")
    return StageWorker(
        name=_text(record, "worker"),
        kind=kind if kind in KINDS else "cpu",
        memory=_parsed(record, "memory", devices.bytes_of, needed=True),
        flops=_parsed(record, "flops", _positive),
        seconds_per_block=_parsed(record, "seconds_per_block", _positive),
        bandwidth=_parsed(record, "bandwidth", devices.bandwidth_of),
    )


def _text(record: Record, key: str) -> str:
    node = record.present(key)
    if isinstance(node, ScalarNode) and node.text.strip():
        return node.text.strip()
    record.error(key, f"{key} is missing" if node is None else f"{key}: use a text")
    return ""


def _parsed(
    record: Record, key: str, parse: Callable[[str], T], *, needed: bool = False
) -> T | None:
    if record.present(key) is None:
        if needed:
            record.error(key, f"{key} is missing")
        return None
    if not (text := _text(record, key)):
        return None
    try:
        return parse(text)
    except UsageError as error:
        record.error(key, f"{key}: {error}" if key not in str(error) else str(error))
        return None


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"{text!r}: use a number > 0, such as 40e12")
    return number


def _require_all_speeds(root: ListNode, problems: Problems) -> None:
    """Report workers without a speed if others have one, since they can't be compared."""
    maps = [item for item in root.items if isinstance(item, MapNode)]
    has = [any(key in item.fields for key in _SPEEDS) for item in maps]
    for item, has_speed in zip(maps, has, strict=True):
        if any(has) and not has_speed:
            problems.error(
                item.at,
                "it has neither flops nor seconds_per_block, but other workers do; give a speed "
                "for all workers or for none",
            )


_TIMES = 5  # timed passes, after one that is not; the result is their median
_ENOUGH_S = 10.0  # after this time, no further pass begins
_KINDS = ("cuda", "cpu")  # on which torch can compute a block


class _Called(Exception):
    """Raised when the block is called, with `inputs` and `named`."""

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named = inputs, named


def measured(run: Run, say: Callable[[str], None]) -> list[StageWorker]:
    """Return a worker for each device of this machine, with its free memory and its speed.

    GPUs come before the CPU. `say` is called with a line for each measurement. Raises UsageError
    for a model with blocks that can't run alone.
    """
    module = _two_blocks(run)
    workers = []
    for place, device in _places(say):
        took = block_seconds(module, run, torch.device(place))
        say(
            f"measured on {device.name}: {seconds(took)} for block 1 of {run.shape.num_blocks}, "
            f"forward and backward, {run.rows} x {run.length} tokens, random weights"
        )
        workers.append(
            StageWorker(
                name=place.replace(":", "-"),
                kind=device.kind,
                memory=device.memory,
                seconds_per_block=took,
                bandwidth=device.bandwidth,
            )
        )
    return workers


def _places(say: Callable[[str], None]) -> Iterator[tuple[str, devices.Device]]:
    """Yield torch's name of each device, and the device."""
    there = devices.found()
    for kind in _KINDS:
        for device in there:
            if device.kind == kind:
                yield device.name.partition(" ")[0], device
    for device in there:
        if device.kind not in _KINDS:
            say(f"not measured: {device.name}, on which torch computes no block")


def block_seconds(module: nn.Module, run: Run, place: torch.device) -> float:
    """Return the seconds of one shard in the last block of `module`, forward and backward.

    `module` has up to two blocks. If only adapters are trained, the first block of a model has no
    gradient to send back, so it does less work than the others.
    """
    layers = blocks.of(module)
    inputs, named = _arguments(module, run, layers[-1])
    block = layers[-1].to(place)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as `entrenar worker` does
    try:
        inputs, named = _moved(inputs, place), _moved(named, place)
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) <= _TIMES and (not times or time.perf_counter() - begun < _ENOUGH_S):
            start = time.perf_counter()
            _pass(block, inputs, named, run, place)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(num_threads)
        block.to("cpu")
    return statistics.median(times[1:] or times)


def _pass(block: nn.Module, inputs: Any, named: Any, run: Run, place: torch.device) -> None:
    """Compute one forward and backward pass, and wait until the device is done."""
    hidden = inputs[0] if inputs else named["hidden_states"]
    hidden = hidden.detach().requires_grad_()
    if inputs:
        inputs = (hidden, *inputs[1:])
    else:
        named = {**named, "hidden_states": hidden}
    masks = Masks(torch.zeros(2, dtype=torch.int32, device=place))
    with precision.applied(precision.of_products(run.settings), place), masks:
        found = block(*inputs, **named)
    out = cast("Tensor", found[0] if isinstance(found, tuple) else found)
    trained = [one for one in block.parameters() if one.requires_grad]
    torch.autograd.grad(out, [hidden, *trained], torch.ones_like(out), allow_unused=True)
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _arguments(module: nn.Module, run: Run, block: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with which the model calls `block`, for a shard of random tokens."""

    def call(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _Called(inputs, named)

    decoder = blocks.decoder_of(module)
    tokens = torch.randint(0, int(run.shape.config.vocab_size), (run.rows, run.length))
    hook = block.register_forward_pre_hook(call, with_kwargs=True)
    try:
        with (
            torch.no_grad(),
            precision.applied(precision.of_products(run.settings), torch.device("cpu")),
        ):
            decoder(input_ids=tokens, use_cache=False)
    except _Called as called:
        return called.inputs, called.named
    finally:
        hook.remove()
    raise UsageError("the model calls none of its blocks, so none can be measured")


def _moved(value: Any, place: torch.device) -> Any:
    """Return `value` with all its tensors moved to `place`."""
    if isinstance(value, Tensor):
        return value.to(place)
    if isinstance(value, tuple):
        return tuple(_moved(one, place) for one in value)
    if isinstance(value, dict):
        return {key: _moved(one, place) for key, one in value.items()}
    return value


def _two_blocks(run: Run) -> nn.Module:
    if run.settings.method == "qlora":
        raise UsageError(
            "method: qlora: weights in NF4 are made from a checkpoint's weights, so a block of "
            "random weights can't be measured; give flops or seconds_per_block by --workers FILE"
        )
    module = models.random(run.settings, num_blocks=min(2, run.shape.num_blocks))
    if run.recompute:
        recompute(module)
    return module
