"""The random generators that a script may draw from, and digests of their states."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from entrenar_py.check.observing import call_sites

States = Mapping[str, str]  # name of a generator -> digest of its state
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DIGEST_BYTES = 12
_DEPTH_MAX = 4  # levels of nested objects to search for generators
_GLOBAL = (
    torch.default_generator,
    getattr(random.seed, "__self__", None),
    getattr(np.random.mtrand, "_rand", None),
)
# The search leaves out the frames and objects of these modules: their generators are not the
# script's.
_LIBRARIES = ("torch", "numpy", "entrenar_py", "runpy", "importlib", "multiprocessing")


class Generators:
    """The global generators (torch's, numpy's, Python's), those of GPUs, and the script's own.

    A generator is the script's own if a variable of one of its functions or modules refers to it
    when the script calls `observe`, or if it is an attribute of an object in such a variable or in
    `objects`. Its name consists of the names of the variable and the attribute. `left_out` are the
    generators of loaders and samplers: the samples that they choose are recorded anyway.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        objects: Mapping[str, object],
        left_out: Iterable[object] = (),
    ) -> None:
        self._model = model
        known = {id(generator) for generator in (*_GLOBAL, *left_out)}
        self._own: dict[str, Any] = {}
        for name, generator in (*_held(sys._getframe(1)), *_in_variables(objects)):
            if id(generator) not in known:
                known.add(id(generator))
                self._own[name] = generator

    def states(self) -> States:
        """Return name -> digest of the state, of each generator."""
        shown = dict[str, bytes]()
        # Torch forbids reading the state of a GPU's generator while a CUDA graph is captured.
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            devices = {p.device for p in self._model.parameters() if p.device.type == "cuda"}
            for device in sorted(devices, key=str):
                # Generators are compared between ranks by name, and each rank has its own GPU.
                name = device.type if len(devices) == 1 else str(device)
                shown[name] = torch.cuda.get_rng_state(device).numpy().tobytes()
        for name, generator in self._own.items():
            shown[name] = state_of(generator)
        return global_states() | _digests(shown)

    def kept(self) -> list[tuple[Callable[[Any], object], Any]]:
        """Return, for each generator, the function that sets its state, and its current state."""
        setters: list[tuple[Callable[[Any], object], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
            (np.random.set_state, np.random.get_state(legacy=False)),
        ]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            setters.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
        return setters + [_kept(generator) for generator in self._own.values()]

    @staticmethod
    def restore(states: Iterable[tuple[Callable[[Any], object], Any]]) -> None:
        """Restore the states that `kept` returned."""
        for set_state, state in states:
            set_state(state)


def global_states() -> dict[str, str]:
    """Return name -> digest of the state, of each global generator except those of GPUs."""
    return _digests(
        {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "python": _python(random),
            "numpy": _bytes(np.random.get_state(legacy=False)),
        }
    )


def is_just_seeded() -> bool:
    """Return whether torch's generator is still in the state in which its last seed left it."""
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    return torch.equal(fresh.get_state(), torch.get_rng_state())


def _digests(states: Mapping[str, bytes]) -> dict[str, str]:
    return {name: blake3(state).hexdigest(_DIGEST_BYTES) for name, state in states.items()}


def moved(before: States, after: States) -> list[str]:
    """Return the names of generators that have another state in `after` than in `before`."""
    return [name for name, state in after.items() if before.get(name, state) != state]


def within(value: object, depth: int = _DEPTH_MAX) -> Iterator[Any]:
    """Yield numpy's and Python's generators that an object uses, or has in its attributes.

    Attributes of attributes are searched, too, up to `depth` levels. Global generators are left
    out.
    """
    kind = type(value)
    if issubclass(kind, _KINDS):
        if kind is not torch.Generator and not any(value is known for known in _GLOBAL):
            yield value
    elif depth:
        for held in _held_by(value):
            yield from within(held, depth - 1)


def _held_by(value: Any) -> Iterator[object]:
    """Yield the script's objects that `value` refers to, or the generators that a function uses."""
    kind = type(value)
    if kind is partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind is MethodType:
        yield value.__self__
    elif kind is FunctionType:
        used = (value.__globals__.get(name) for name in _names(value.__code__))
        yield from (one for one in used if issubclass(type(one), _KINDS))
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # the variable of the closure isn't assigned yet
                yield cell.cell_contents
    elif not issubclass(kind, type | ModuleType | torch.Tensor):
        with suppress(AttributeError):
            yield from [*object.__getattribute__(value, "__dict__").values()]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def seed(generator: Any, number: int) -> None:
    """Seed a generator of numpy or of Python."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(number).state
    else:
        generator.seed(number)


def _kept(generator: Any) -> tuple[Callable[[Any], object], Any]:
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.set_state, generator.get_state(legacy=False)
    bits = generator.bit_generator
    return lambda state: setattr(bits, "state", state), bits.state


def state_of(generator: Any) -> bytes:
    """Return the state of a generator of torch, numpy or Python."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        return _python(generator)
    if isinstance(generator, np.random.RandomState):
        return _bytes(generator.get_state(legacy=False))
    return _bytes(generator.bit_generator.state)


def _python(generator: Any) -> bytes:
    _, state, gauss = generator.getstate()
    return array("Q", state).tobytes() + repr(gauss).encode()


def _bytes(state: Any) -> bytes:
    if isinstance(state, Mapping):
        return b"".join(_bytes(value) for value in state.values())
    return bytes(state.tobytes()) if isinstance(state, np.ndarray) else repr(state).encode()


def _held(frame: Any) -> Iterator[tuple[str, Any]]:
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _LIBRARIES:
            yield from _in_variables(call_sites.local_variables(frame))
            yield from _in_variables(frame.f_globals)
        frame = frame.f_back


def _in_variables(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # Test the type, not `__class__`: reading the `__class__` of a proxy may run the script's code.
    for name, value in [*variables.items()]:
        kind = type(value)
        of_library = str(kind.__module__).partition(".")[0] in _LIBRARIES
        if issubclass(kind, _KINDS):
            yield name, value
        elif not issubclass(kind, type) and not of_library:
            with suppress(AttributeError):
                inside = object.__getattribute__(value, "__dict__")
                for attribute, held in [*inside.items()]:
                    if issubclass(type(held), _KINDS):
                        yield f"{name}.{attribute}", held
