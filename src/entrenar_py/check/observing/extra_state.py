"""State besides the model: copies of it (an average, a teacher, a reference), and frozen modules.

No hook reports that a script creates such state. So the objects that the garbage collector knows
are searched, as in `surroundings`. A search takes 0.15 s with torch loaded.

A copy is a module, a list or a dictionary of tensors with the shapes of the model's parameters, or
of the parameters of a part of the model (such as a generator), in their order. Whether it is an
average, or a list of something else, shows in how it changes (`check.causes.weight_averages`).
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook

from entrenar_py.check.observing import call_sites, tensors
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import hook_calls, trace
from entrenar_py.shared.errors import UsageError

Named = Mapping[str, Tensor]
Found = tuple[Any, Named]  # the object that holds the tensors, and the tensors

_KINDS = (Tensor, nn.Parameter, DTensor)
# The numbers of the calls that search: before the first step, after the second one (an average may
# begin with the first), and rarely later. Other calls search only if a tensor is gone, since some
# scripts create an average's tensors again.
_LOOKS = {1, 3, *(4**power for power in range(2, 10))}
_DICTS = (dict, OrderedDict)
# At most so many of each kind are recorded: one takes as much time as the model's weights.
_MOST = 4
_STATISTICS = ("running_mean", "running_var")


class ExtraState:
    """The state besides the model of `subject`. `declared` has averages under the script's names.

    Raises UsageError for a declared average that is not a copy of the model.
    """

    def __init__(self, subject: Subject, declared: Mapping[str, Any]) -> None:
        self._subject, self._declared = subject, declared
        self._num_looks = 0
        self._copies: dict[str, ref[Tensor]] = {}  # `label/tensor` -> reference
        self._frozen: dict[str, ref[Tensor]] = {}
        self._dropout = FrozenDropout()
        for label, average in declared.items():
            if _declared_copy(average, _orders(subject)) is None:
                raise UsageError(
                    f"averages={{{label!r}: a {type(average).__name__}}}: give a module, a list or "
                    "a dictionary of tensors, or an object that has one; its tensors must have the "
                    "shapes of the model's parameters, in their order"
                )

    def records(self) -> trace.Tensors:
        """Return `label/tensor` -> record, for all tensors besides the model.

        The tensors of a copy have the names of the model's parameters. For frozen modules, which
        may be larger than the model, only digests are recorded.
        """
        self._num_looks += 1
        is_lost = any(held() is None for held in (*self._copies.values(), *self._frozen.values()))
        if self._num_looks in _LOOKS or is_lost:
            self._look()
        orders = _orders(self._subject)
        declared = [(n, _declared_copy(one, orders) or {}) for n, one in self._declared.items()]
        copies = {**_alive(self._copies), **_labelled(declared)}
        frozen = _alive(self._frozen)
        frozen |= self._dropout.counts()
        return {**self._subject.record_placed(copies), **self._subject.digests(frozen)}

    def _look(self) -> None:
        """Find all copies of the model, and all frozen modules with statistics or dropout."""
        orders, things = _orders(self._subject), _holders()
        modules = [thing for thing in things if isinstance(thing, nn.Module)]
        copies: list[Found] = []
        frozen: list[Found] = []
        for module in _outermost_beside(self._subject.model, modules):
            statistics = _statistics(module)
            if (copy := _copy_in_module(module, orders)) is not None:
                copies.append((module, {**copy, **statistics}))
            elif may_draw(module) or (
                statistics and not any(p.requires_grad for p in module.parameters())
            ):
                frozen.append((module, {**_parameters(module), **statistics}))
        containers = (thing for thing in things if not isinstance(thing, nn.Module))
        copies += _copies_in_containers(containers, orders, self._known(modules))
        labels = _labels([*copies, *frozen], {*self._declared})
        self._copies = _refs(copies, labels)
        self._frozen = _refs(frozen, labels[len(copies) :])
        named = zip(labels, (thing for thing, _ in [*copies, *frozen]), strict=True)
        self._dropout.watch((n, thing) for n, thing in named if isinstance(thing, nn.Module))

    def _known(self, modules: Iterable[nn.Module]) -> set[int]:
        """Return the ids of the tensors that modules and optimizers have, and of gradients."""
        subject = self._subject
        known = {id(held) for module in modules for held in _own_tensors(module)}
        known.update(id(gradient) for gradient in subject.gradients().values())
        for optimizer in subject.optimizers:
            for entries in optimizer.state.values():
                known.update(map(id, entries.values() if isinstance(entries, Mapping) else ()))
        return known


# --- modules --------------------------------------------------------------------------------------


def _outermost_beside(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that share nothing with the model, without those inside one another."""
    own = {*model.modules()}
    holders = {module for module in modules if not own.isdisjoint(module.modules())}
    held = (module for module in modules if module not in holders)
    inner = {part for module in held for part in module._modules.values()}
    yield from (module for module in modules if module not in holders | inner)


def _copy_in_module(module: nn.Module, orders: Sequence[Named]) -> Named | None:
    """Return parameter name -> the module's copy of the parameter; None if the module has none.

    A module may keep the copies in buffers, among other buffers.
    """
    if (copy := _in_order([*module.parameters()], orders)) is not None:
        return copy
    buffers = [*module.buffers()]
    for order in orders:
        for at in range(len(buffers) - len(order) + 1):
            if (copy := _in_order(buffers[at : at + len(order)], [order])) is not None:
                return copy
    return None


def _statistics(module: nn.Module) -> Named:
    return {
        tensors.plain_name(name): buffer
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2] in _STATISTICS and not buffer.is_meta
    }


def _parameters(module: nn.Module) -> Named:
    return {tensors.plain_name(n): p for n, p in module.named_parameters() if not p.is_meta}


def _own_tensors(module: nn.Module) -> Iterator[Tensor | None]:
    yield from module._parameters.values()
    yield from module._buffers.values()


# --- lists and dictionaries -----------------------------------------------------------------------


def _copies_in_containers(
    containers: Iterable[Any], orders: Sequence[Named], known: set[int]
) -> list[Found]:
    """Return the lists and dictionaries of tensors that are copies, unless these are in `known`."""
    memory = {_memory(tensor) for order in orders for tensor in order.values()}
    sizes = {*map(len, orders)}
    least = min(sizes, default=1)
    copies: list[Found] = []
    for thing in containers:
        if len(thing) < least or (type(thing) is list and len(thing) not in sizes):
            continue
        copy = _copy_in_container(thing, orders)
        if copy is None or known.intersection(map(id, copy.values())):
            continue
        if memory.isdisjoint(map(_memory, copy.values())):
            known.update(map(id, copy.values()))
            copies.append((thing, copy))
    return copies


def _copy_in_container(thing: Any, orders: Sequence[Named]) -> Named | None:
    is_mapping = isinstance(thing, Mapping)
    if type(next(iter(thing.values() if is_mapping else thing), None)) not in _KINDS:
        return None
    for order in orders if is_mapping else ():  # a whole state has buffers, too
        if order.keys() <= thing.keys():
            return _in_order([thing[name] for name in order], [order])
    return _in_order([*(thing.values() if is_mapping else thing)], orders)


def _in_order(values: Sequence[Any], orders: Sequence[Named]) -> Named | None:
    for order in orders:
        if len(order) == len(values) and all(map(_is_like, values, order.values())):
            return dict(zip(order, values, strict=True))
    return None


def _is_like(tensor: Any, parameter: Tensor) -> bool:
    return (
        type(tensor) in _KINDS
        and tensor.shape == parameter.shape
        and tensor.is_floating_point()
        and not tensor.is_meta
        and isinstance(tensor, DTensor) is isinstance(parameter, DTensor)
    )


def _declared_copy(average: Any, orders: Sequence[Named]) -> Named | None:
    """Return the copy that a script declares: a module, a container, or an object that has one.

    None if it is not a copy.
    """
    for thing in (average, *getattr(average, "__dict__", {}).values()):
        if isinstance(thing, nn.Module):
            copy = _copy_in_module(thing, orders)
        elif isinstance(thing, Mapping | list | tuple):
            copy = _copy_in_container(thing, orders)
        else:
            copy = None
        if copy is not None:
            return copy
    return None


# --- names and references -------------------------------------------------------------------------


def _orders(subject: Subject) -> list[Named]:
    """Return the parameters of the model, the trained ones, and those of each of its parts.

    A part counts only if it has parts itself, since many tensors resemble those of a single layer.
    A single tensor doesn't count for the same reason.
    """
    parameters = subject.parameters
    parts = (
        {name: p for name, p in parameters.items() if name.startswith(f"{path}.")}
        for path, part in subject.model.named_children()
        if any(True for _ in part.children())
    )
    return [order for order in (parameters, subject.trained, *parts) if len(order) > 1]


def _holders() -> list[Any]:
    """Return all modules, lists and dictionaries, without reading the attributes of objects."""
    everything = gc.get_objects()
    kinds = {
        kind for kind in {*map(type, everything)} if issubclass(kind, nn.Module) or kind in _DICTS
    }
    return [thing for thing in everything if type(thing) is list or type(thing) in kinds]


def _memory(tensor: Tensor) -> int:
    return tensors.local(tensor).data_ptr()


def _labels(things: Sequence[Found], taken: set[str]) -> list[str]:
    """Return for each object the first name under which it is kept, or else its class.

    Several objects may have the same name, since a loaded checkpoint has the names of the state.
    Then the name belongs to a module, or to the attribute of an object. Otherwise sizes are added
    to the names. If these are equal as well, nothing distinguishes the objects in a different run
    or on a different rank, and the name is "".
    """
    labels, orders = [], []
    for thing, (names, is_own) in zip(
        [thing for thing, _ in things], _kept_as(things), strict=True
    ):
        labels.append(min(names, default=type(thing).__name__))
        is_state = hasattr(thing, "_metadata")  # what a module's state_dict returned
        orders.append(0 if isinstance(thing, nn.Module) else 1 if is_own and not is_state else 2)
    places = Counter(zip(labels, orders, strict=True))
    firsts = {label: min(order for name, order in places if name == label) for label in labels}
    shown = [
        name
        if order == firsts[name] and places[name, order] == 1
        else f"{name}[{sum(tensor.numel() for tensor in held.values())}]"
        for name, order, (_, held) in zip(labels, orders, things, strict=True)
    ]
    counts = Counter(shown)
    return [name if counts[name] == 1 and name not in taken else "" for name in shown]


def _kept_as(found: Sequence[Found]) -> list[tuple[set[str], bool]]:
    """Return each object's names, and whether one of them is more than a key of a dictionary."""
    things = [thing for thing, _ in found]
    names: list[set[str]] = [set() for _ in things]
    is_own = [False for _ in things]
    for owner in gc.get_referrers(*things):
        is_dict = type(owner) is dict
        held = owner if is_dict else None if isinstance(owner, FrameType) else _attributes(owner)
        for name, value in [*held.items()] if type(held) is dict else ():
            for at, thing in enumerate(things):
                if value is thing and type(name) is str:
                    names[at].add(name)
                    is_own[at] |= not is_dict or "__name__" in owner
    for at, name in _local_names(things):
        if not names[at]:
            names[at].add(name)
            is_own[at] = True
    return [*zip(names, is_own, strict=True)]


def _local_names(things: Sequence[Any]) -> Iterator[tuple[int, str]]:
    for frame in reversed([*call_sites.own_frames()]):
        for name, value in call_sites.local_variables(frame).items():
            for at, thing in enumerate(things):
                if value is thing:
                    yield at, name


def _attributes(owner: Any) -> Any:
    with suppress(Exception):  # code of the script may run here and fail
        return owner.__dict__
    return None


def _refs(found: Sequence[Found], labels: Sequence[str]) -> dict[str, ref[Tensor]]:
    chosen = [(label, held) for label, (_, held) in zip(labels, found, strict=False) if label]
    return {name: ref(tensor) for name, tensor in _labelled(chosen[:_MOST]).items()}


def _labelled(copies: Iterable[tuple[str, Named]]) -> dict[str, Tensor]:
    return {f"{label}/{name}": one for label, copy in copies for name, one in copy.items()}


def _alive(refs: Mapping[str, ref[Tensor]]) -> dict[str, Tensor]:
    held = {name: kept() for name, kept in refs.items()}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


# --- dropout of what doesn't train ----------------------------------------------------------------


class FrozenDropout:
    """Counts the dropout masks of each module that was passed to `watch`, by label.

    The hook is torch's global one, since modules with their own hooks could not be pickled.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # Dropout module -> label.
        self._labels: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._is_hooked = False

    def watch(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Count the masks of these modules from here on, under the given labels."""
        for label, module in named:
            if label and may_draw(module):
                self._counts[label] += 0
                drawing = (part for part in module.modules() if isinstance(part, _DropoutNd))
                self._labels.update((part, label) for part in drawing if part not in self._labels)
        if self._labels and not self._is_hooked:
            self._is_hooked = True
            register_module_forward_hook(self._count)

    def counts(self) -> dict[str, Tensor]:
        """Return `masks of LABEL/num_masks` -> the number of masks."""
        return {f"masks of {n}/num_masks": torch.tensor(c) for n, c in self._counts.items()}

    @hook_calls.outside
    def _count(self, module: nn.Module, *_: Any) -> None:
        label = self._labels.get(module) if module.training else None
        if label is not None:
            self._counts[label] += 1


def may_draw(module: nn.Module) -> bool:
    """Return whether a module has dropout and no parameter that trains."""
    has_dropout = any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules())
    return has_dropout and not any(p.requires_grad for p in module.parameters())
