"""Parameters by number: which gradients a pass touches, whether these were applied, what moved."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from entrenar_py.check.anatomy.record import Event, Named
from entrenar_py.check.observing import tensors

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGEST_BYTES_MAX = 2**20  # of each tensor
_DIGEST_TENSORS_MAX = 4
_SHAPES_MAX = 3
_NORM = 1e-2  # relative difference of two norms; one may be rounded to bfloat16


class State(NamedTuple):
    """The identity of a gradient, which changes with each write."""

    address: int
    version: int


def fingerprints(held: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor, which almost surely changes with its bits."""
    sums = [_bits(tensor).sum(dtype=torch.int64).reshape(()) for tensor in held]
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(sums):
        by_device.setdefault(one.device, []).append(index)
    results = [0] * len(sums)
    for indices in by_device.values():  # one wait for each device
        values = torch.stack([sums[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            results[index] = value
    return results


def _bits(tensor: Tensor) -> Tensor:
    part = tensors.local(tensor)
    return part.view(_INTEGERS[part.element_size()])


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensors.local(tensor).untyped_storage().data_ptr()


def shapes(held: Iterable[Any]) -> str:
    """Return dtypes and shapes of the first tensors: "float32 [8, 4], int64 [8]"."""
    found = [one for one in held if isinstance(one, Tensor)][:_SHAPES_MAX]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {_shape(t)}" for t in found)


def _shape(tensor: Tensor) -> str:
    return "nested" if tensor.is_nested else str([*tensor.shape])


def digest(held: Iterable[Any]) -> str:
    """Return a digest of the first tensors; "" if there are none."""
    full = [one for one in held if isinstance(one, Tensor) and one.numel() and not one.is_meta]
    results = [one.values() if one.is_nested else one for one in full[:_DIGEST_TENSORS_MAX]]
    if not results:
        return ""
    text = hashlib.blake2b(digest_size=8)
    for tensor in results:
        part = _bits(tensor).flatten()
        part = part[: _DIGEST_BYTES_MAX // part.element_size()].cpu().contiguous()
        text.update(part.numpy().tobytes())
    return text.hexdigest()


class Parameters:
    """All parameters that modules and optimizers of the script have had, by number."""

    def __init__(self, write: Callable[[Event], None]) -> None:
        self._write = write
        self._numbers: Any = WeakIdKeyDictionary()
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._modules: Any = WeakIdKeyDictionary()
        # Gradients in the last step of their optimizer: state and fingerprint, as memory is reused.
        self._applied: dict[int, tuple[State, int]] = {}
        self._weights: dict[int, int] = {}  # fingerprints after that step
        self._places: dict[int, tuple[str, int]] | None = None  # memory -> contents, number

    # --- numbers ----------------------------------------------------------------------------------

    def meet(self, named: Iterable[tuple[str, Tensor]], *, is_module: bool = True) -> list[int]:
        """Return the numbers of tensors; those that are new are written with their names.

        Parameters of a lazy module are left out until it has made them.
        """
        results = []
        for name, tensor in named:
            if is_lazy(tensor):
                continue
            number = self._numbers.get(tensor)
            is_new = number is None
            if number is None:
                number = self._numbers[tensor] = len(self._known)
                self._known[number] = weakref.ref(tensor)
            results.append(number)
            if is_new or (is_module and tensor not in self._modules):
                size = tensor.numel() * tensor.element_size()
                shape = str([*tensor.shape])
                self._write(Named(number=number, name=name, shape=shape, bytes=size))
            if is_module:
                self._modules[tensor] = True
        return results

    def meet_module(self, module: nn.Module) -> list[int]:
        """Return the numbers of a module's parameters, and write their names."""
        named = tensors.unwrapped(module).named_parameters()
        return self.meet((tensors.plain_name(name), tensor) for name, tensor in named)

    def of(self, held: Iterable[Any]) -> list[int]:
        """Return the numbers of the tensors that are known."""
        return [self._numbers[one] for one in held if one in self._numbers]

    def known(self) -> dict[int, Tensor]:
        """Return the parameters that are alive."""
        alive = {number: ref() for number, ref in self._known.items()}
        return {number: tensor for number, tensor in alive.items() if tensor is not None}

    # --- gradients --------------------------------------------------------------------------------

    def states(self) -> dict[int, State]:
        """Return the states of all gradients that exist."""
        return {
            number: State(id(tensor.grad), tensor.grad._version)
            for number, tensor in self.known().items()
            if tensor.grad is not None
        }

    def touched(self, before: Mapping[int, State]) -> list[int]:
        """Return the parameters with gradients that have changed since `before`."""
        self.forget_places()
        results = [n for n, state in self.states().items() if before.get(n) != state]
        for number in results:
            self._applied.pop(number, None)
        return results

    def applied_already(self, wanted: Collection[int]) -> list[int]:
        """Return those of `wanted` with the gradients that the last step applied, if not zero."""
        states = self.states()
        past = {n: self._applied[n] for n in wanted if n in self._applied}
        same = self.present(n for n, (state, _) in past.items() if state == states.get(n))
        now = self._gradient_prints(same)
        return [n for n in same if past[n][1] == now[n]]

    def renew(self, wanted: Iterable[int]) -> None:
        """Take the present gradients for those of the last step: they were scaled or clipped."""
        states = self.states()
        prints = self._gradient_prints(n for n in wanted if n in states)
        self._applied |= {n: (states[n], one) for n, one in prints.items()}

    def _gradient_prints(self, wanted: Iterable[int]) -> dict[int, int]:
        known = self.known()
        held = {n: known[n].grad for n in wanted}
        graded = {n: gradient for n, gradient in held.items() if gradient is not None}
        return dict(zip(graded, fingerprints(graded.values()), strict=True))

    def present(self, wanted: Iterable[int] | None = None) -> list[int]:
        """Return the parameters with gradients that are not zero, among `wanted` or all."""
        known = self.known()
        numbers = known if wanted is None else [n for n in wanted if n in known]
        return [n for n in numbers if _is_present(known[n].grad)]

    def norm(self, wanted: Iterable[int]) -> float:
        """Return the L2 norm of the gradients of `wanted`."""
        known = self.known()
        return tensors.norm([known[n].grad for n in wanted if n in known])

    def trained(self, wanted: Iterable[int]) -> list[int]:
        """Return those of `wanted` that require a gradient or have one, and aren't empty here."""
        known = self.known()
        alive = [n for n in wanted if n in known and tensors.local(known[n]).numel()]
        return [n for n in alive if known[n].requires_grad or known[n].grad is not None]

    def with_gradients(self, wanted: Iterable[int]) -> list[int]:
        """Return those of `wanted` that have gradients."""
        known = self.known()
        return [n for n in wanted if n in known and known[n].grad is not None]

    # --- steps ------------------------------------------------------------------------------------

    def edited(self) -> list[int]:
        """Return the parameters that have changed since the last step of their optimizer."""
        known = self.known()
        past = [n for n in self._weights if n in known]
        now = fingerprints(known[n].detach() for n in past)
        return [n for n, one in zip(past, now, strict=True) if self._weights[n] != one]

    def weights(self, wanted: Iterable[int]) -> dict[int, int]:
        """Return fingerprints of `wanted`."""
        known = self.known()
        alive = [n for n in wanted if n in known]
        return dict(zip(alive, fingerprints(known[n].detach() for n in alive), strict=True))

    def stepped(self, before: Mapping[int, int]) -> tuple[int, str]:
        """Record that an optimizer stepped; return how many parameters moved, and their digest."""
        now = self.weights(before)
        for number in before:
            self._applied.pop(number, None)
        self.renew(before)
        self._weights |= now
        text = " ".join(map(str, sorted(now.values()))).encode()
        moved = sum(now.get(number) != one for number, one in before.items())
        return moved, hashlib.blake2b(text, digest_size=8).hexdigest()

    # --- collectives ------------------------------------------------------------------------------

    def forget_places(self) -> None:
        """Forget where gradients lie in memory."""
        self._places = None

    def contents(
        self, tensors_now: Iterable[Tensor], buffers: Iterable[Tensor]
    ) -> tuple[str, list[int]]:
        """Return what tensors hold: gradients, parameters, buffers or other, and which numbers."""
        if self._places is None:
            self._places = {}
            known = self.known()
            for kind, by_number in (
                ("gradients", {n: t.grad for n, t in known.items() if t.grad is not None}),
                ("parameters", {n: t.detach() for n, t in known.items()}),
            ):
                for number, tensor in by_number.items():
                    self._places.setdefault(storage(tensor), (kind, number))
            for buffer in buffers:
                self._places.setdefault(storage(buffer), ("buffers", -1))
        results = [self._places.get(storage(result)) for result in tensors_now if result.numel()]
        if results and all(result is not None for result in results):
            kinds = {result[0] for result in results if result is not None}
            if len(kinds) == 1:
                return kinds.pop(), sorted(
                    {result[1] for result in results if result and result[1] >= 0}
                )
        return self._flattened([*tensors_now])

    def _flattened(self, tensors_now: list[Tensor]) -> tuple[str, list[int]]:
        """Return all parameters for one tensor with all gradients, or parameters, behind another.

        It is recognised by its size and its norm.
        """
        graded = {n: t for n, t in self.known().items() if t.grad is not None}
        size = sum(tensor.numel() for tensor in graded.values())
        flat = tensors_now[0] if len(tensors_now) == 1 else None
        if flat is None or flat.ndim != 1 or len(graded) < 2 or flat.numel() != size:
            return "other", []
        norm = tensors.norm([flat.detach()])
        for kind, parts in (
            ("gradients", [tensor.grad for tensor in graded.values()]),
            ("parameters", [tensor.detach() for tensor in graded.values()]),
        ):
            if abs(tensors.norm(parts) - norm) <= _NORM * norm:
                return kind, [*graded]
        return "other", []


def _is_present(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(tensors.local(gradient).any())


def rounded(number: float) -> float:
    """Return a number with six digits."""
    return float(f"{number:.6g}") if math.isfinite(number) else number
