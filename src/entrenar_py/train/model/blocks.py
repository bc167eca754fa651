"""The decoder blocks of a transformers model, and how ranks can share them.

Blocks are consecutive layers with the same structure. The plan in the model's own configuration
says how they are shared: it names layers that are cut by columns (their outputs) or by rows (their
inputs). Models on torch's meta device have such a plan, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from entrenar_py.shared.errors import UsageError

T = TypeVar("T")


def of(module: nn.Module) -> nn.ModuleList:
    """Return the blocks of `module`, in order.

    Raises UsageError if no list in it has the number of layers that its configuration states.
    """
    return place_of(module)[1]


def place_of(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name of the blocks in `module`, and the blocks. Raises as `of` does."""
    config = cast("Any", module).config.get_text_config()
    number = getattr(config, "num_hidden_layers", None)
    for name, layers in module.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == number:
            return name, layers
    raise UsageError(
        f"model: {type(module).__name__} has no list of {number} blocks, which this needs; use "
        "strategy: ddp and recompute: none"
    )


def probed(module: nn.Module, run: Callable[[], T]) -> T:
    """Return `run()`, called while `module` has only its first blocks: one of each kind at least.

    `run` calls `module` to see what it does. Blocks of transformers with the same structure and the
    same settings do the same. `run` is called with all blocks where their code is another's, where
    there is no list of them, and where `module` fails without the others.
    """
    try:
        with _few(module):
            return run()
    except (UsageError, *_FAILURES):
        return run()


_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_LIBRARY = "transformers."  # code that comes with a checkpoint may look at a block's index
_OWN = ("layer_idx", "training")  # what differs between blocks of one kind, or passes


@contextmanager
def _few(module: nn.Module) -> Iterator[None]:
    """Leave only the first blocks in `module`: as many as have one of each kind."""
    name, layers = place_of(module)
    kinds, number = list[Any](), 0
    for index, block in enumerate(layers):
        is_known = type(block).__module__.startswith(_LIBRARY)
        kind = _kind(block) if is_known else index
        if kind not in kinds:
            kinds.append(kind)
            number = index + 1
    above, _, last = name.rpartition(".")
    parent = module.get_submodule(above)
    setattr(parent, last, layers[:number])
    try:
        yield
    finally:
        setattr(parent, last, layers)


def _kind(block: nn.Module) -> list[Any]:
    """Return what `block` consists of: its parts, their classes, plain attributes and shapes.

    Functions, and attributes that are objects or tables, aren't compared.
    """
    return [
        (
            name,
            type(part),
            {key: one for key, one in vars(part).items() if key not in _OWN and _is_plain(one)},
            [
                (key, tensor.shape, tensor.dtype)
                for tensors in (part.named_parameters, part.named_buffers)
                for key, tensor in tensors(recurse=False)
            ],
        )
        for name, part in block.named_modules()
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


COLUMNS, ROWS = "colwise", "rowwise"
_WHOLE = "replicated_with_grad_allreduce"  # an uncut layer between cut ones, as a head's norm


@dataclass(frozen=True)
class Plan:
    """The layers of `decoder` to cut, by name: COLUMNS or ROWS.

    `problem` says why they can't be cut; "" if they can.
    """

    decoder: nn.Module
    styles: dict[str, str]
    problem: str = ""

    @property
    def regions(self) -> list[str]:
        """The names of modules inside which ranks hold different values: attentions and MLPs."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.styles))


def plan_of(module: nn.Module) -> Plan:
    """Return the plan for cutting `module`."""
    decoder = decoder_of(module)
    named = type(decoder).__name__
    rules = getattr(cast("Any", decoder).config, "base_model_tp_plan", None)
    if not rules:
        return Plan(decoder, {}, f"{named} has no plan for cutting its layers (base_model_tp_plan)")
    styles = dict[str, str]()
    for name, layer in decoder.named_modules():
        for pattern, style in rules.items():
            if style == _WHOLE or not _matches(pattern, name):
                continue
            kind = type(base_of(layer))
            if issubclass(kind, nn.Embedding):
                continue  # some releases add tied embeddings; ours stay whole, on all ranks
            if style not in (COLUMNS, ROWS) or kind is not nn.Linear:
                problem = f"{named} would have {name} cut by {style}, a {kind.__name__}"
                return Plan(decoder, {}, problem)
            styles[name] = style
    return Plan(decoder, styles)


def problem_of_sharing(module: nn.Module, size: int) -> str:
    """Return why `size` ranks can't share the layers of `module`; "" if they can."""
    plan = plan_of(module)
    return plan.problem or _uneven(plan, size) or _drawing(module)


def decoder_of(module: nn.Module) -> nn.Module:
    """Return the model without peft's wrapper and without the head."""
    base = cast("Any", module)
    base = base.get_base_model() if hasattr(base, "peft_config") else base
    decoder: nn.Module = base.base_model
    if decoder is base and hasattr(base, "model"):  # Llama 4's prefix names a part that it lacks
        return cast("nn.Module", base.model)
    return decoder


def base_of(layer: nn.Module) -> nn.Module:
    """Return the layer under peft's adapter, or the layer itself."""
    return cast("nn.Module", getattr(layer, "base_layer", layer))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _uneven(plan: Plan, size: int) -> str:
    """Return which heads or layers `size` ranks can't share evenly; "" if there are none."""
    config = cast("Any", plan.decoder).config
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (number := getattr(config, key, None) or 0) % size:
            return f"{key}={number} is no multiple of {size} ranks"
    for name, style in plan.styles.items():
        weight = cast("Tensor", base_of(plan.decoder.get_submodule(name)).weight)
        number = weight.shape[0 if style == COLUMNS else 1]
        if number % size:
            side = "outputs" if style == COLUMNS else "inputs"
            return f"{name} has {number} {side}, no multiple of {size} ranks"
    return ""


def _drawing(module: nn.Module) -> str:
    """Return the dropout of the model itself, which ranks would draw differently; "" if none.

    The dropout of peft's adapters is drawn for the whole layer, so it doesn't count.
    """
    for key, value in cast("Any", module).config.to_dict().items():
        is_dropout = "drop" in key and not key.startswith("classifier")
        if is_dropout and isinstance(value, float) and value > 0:
            return f"{key}={value} in config.json draws random numbers that differ between ranks"
    return ""
