"""Measures how fast this machine's devices compute a block of a model: forward and backward.

The block has the model's shape and random weights. It computes one shard of the run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import blocks, precision
from entrenar_py.train.model import model as models
from entrenar_py.train.plan import devices
from entrenar_py.train.plan.plan import Run
from entrenar_py.train.plan.stages.stage_workers import StageWorker
from entrenar_py.train.plan.units import seconds

_TIMES = 5  # of which the median is taken, after one pass that is not timed
_ENOUGH_S = 10.0  # no further pass is begun after so long
_KINDS = ("cuda", "cpu")  # that torch computes a block on


class _Called(Exception):
    """The block was called with `inputs` and `named`."""

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named = inputs, named


def workers(run: Run, say: Callable[[str], None]) -> list[StageWorker]:
    """Return a worker for each device of this machine, with its free memory and its speed.

    GPUs come before the CPU. `say` is told what was measured. Raises UsageError for a model whose
    block can't be run alone.
    """
    module = _two_blocks(run)
    found = []
    for place, device in _places(say):
        took = block_seconds(module, run, torch.device(place))
        say(
            f"measured on {device.name}: {seconds(took)} for block 1 of {run.shape.num_blocks}, "
            f"forward and backward, {run.rows} x {run.length} tokens, random weights"
        )
        found.append(
            StageWorker(
                name=place.replace(":", "-"),
                kind=device.kind,
                memory=device.memory,
                seconds_per_block=took,
                bandwidth=device.bandwidth,
            )
        )
    return found


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
    """Return the seconds of a shard in the second block of `module`, forward and backward.

    The first block of a model whose adapters are all that is trained has no gradient to send on,
    so it does less than others.
    """
    layers = blocks.of(module)
    inputs, named = _arguments(module, run, layers[-1])
    block = layers[-1].to(place)
    try:
        inputs, named = _moved(inputs, place), _moved(named, place)
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) <= _TIMES and (not times or time.perf_counter() - begun < _ENOUGH_S):
            start = time.perf_counter()
            _pass(block, inputs, named, run, place)
            times.append(time.perf_counter() - start)
    finally:
        block.to("cpu")
    return statistics.median(times[1:] or times)


def _pass(block: nn.Module, inputs: Any, named: Any, run: Run, place: torch.device) -> None:
    """Make one pass, and wait until the device is done."""
    hidden = inputs[0] if inputs else named["hidden_states"]
    hidden = hidden.detach().requires_grad_()
    if inputs:
        inputs = (hidden, *inputs[1:])
    else:
        named = {**named, "hidden_states": hidden}
    with precision.applied(precision.of_products(run.settings), place):
        found = block(*inputs, **named)
    out = cast("Tensor", found[0] if isinstance(found, tuple) else found)
    trained = [one for one in block.parameters() if one.requires_grad]
    torch.autograd.grad(out, [hidden, *trained], torch.ones_like(out), allow_unused=True)
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _arguments(module: nn.Module, run: Run, block: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Return what the model calls `block` with, for a shard of random tokens."""

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
    """Return `value` with all its tensors on `place`."""
    if isinstance(value, Tensor):
        return value.to(place)
    if isinstance(value, tuple):
        return tuple(_moved(one, place) for one in value)
    if isinstance(value, dict):
        return {key: _moved(one, place) for key, one in value.items()}
    return value


def _two_blocks(run: Run) -> nn.Module:
    """Return the model with random weights and two blocks, or one if it has no more."""
    if run.settings.method == "qlora":
        raise UsageError(
            "method: qlora: weights in NF4 are made from a checkpoint's, so no block of random "
            "ones is measured; give flops or seconds_per_block by --workers FILE"
        )
    return models.random(run.settings, num_blocks=min(2, run.shape.num_blocks))
