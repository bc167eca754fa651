"""Record what crosses the borders of modules, for `entrenar-check diff`.

Recorded are inputs and outputs of modules with the gradients that reach them, losses, gradients and
updates of parameters, buffers, generators, and the settings of optimizers. The observer says where
a micro-batch and a step begin; everything else comes from hooks of modules and tensors. Modules
inside compiled code have no borders.

In a run with `noise`, each weight, each output of a module and each gradient at a border is
multiplied by 1 + eps or 1 - eps of its dtype, by chance. That stands for the rounding of any other
order of the same operations, so the distance of such a run shows what rounding can do.
"""

from __future__ import annotations

import atexit
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing import FOLDER, generators, script_lines, tensors
from entrenar_py.check.observing.module_hooks import OwnHook
from entrenar_py.check.observing.operations import Operations
from entrenar_py.check.observing.sketches import DTYPES, Sketches
from entrenar_py.check.rank_files import border_file, notes
from entrenar_py.check.rank_files.border_file import Border, BorderFile, Settings
from entrenar_py.compute import digest
from entrenar_py.shared import hook_calls
from entrenar_py.shared.trace import Sketch

VALUES_MAX = 4096  # elements up to which a tensor is kept as values, and above as a sketch
_DIGEST_BYTES = 8
_OF_TORCHRUN = "TORCHELASTIC_"  # its own state, new in each run
_ENVIRONMENT = ("CUDA_", "CUBLAS_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "NVIDIA_TF32")

_KERNELS = ("foreach", "fused", "capturable", "differentiable")  # settings that compute the same
_RESERVED = 64  # places for the inputs of a model that is called before its hooks are set
_SCHEDULE = 2**20  # operations of float64 that may give a learning rate, as a product over steps


def begin_if_planned(model: nn.Module, rank: int) -> Borders | None:
    """Return what records the borders of `model` if the harness asked for it, else None."""
    settings = Settings.planned()
    if settings is None:
        return None
    folder = Path(os.environ[FOLDER])
    file = BorderFile(folder, rank, facts(model))
    atexit.register(file.close)
    failed = partial(notes.write_problem, folder)
    borders = Borders(model, file.append, settings, failed=failed)
    script_lines.clock = borders.num_written
    return borders


def facts(model: nn.Module) -> dict[str, str]:
    """Return facts about this process that may explain differences of two runs."""
    first = next(model.parameters(), None)
    place = torch.device("cpu") if first is None else first.device
    matmul = torch.backends.cuda.matmul
    known = {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        "dtype of weights": "" if first is None else str(first.dtype),
        "threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if place.type == "cuda":
        known |= {
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "cuDNN benchmark": str(torch.backends.cudnn.benchmark),
            "TF32 in products": str(matmul.allow_tf32),
        }
    variables = {
        name: text
        for name, text in os.environ.items()
        if name.startswith(_ENVIRONMENT) and not name.startswith(_OF_TORCHRUN)
    }
    return {name: text for name, text in {**known, **variables}.items() if text}


def _quiet(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` as a hook: an error of ours ends the record, not the script."""

    @hook_calls.ours
    @wraps(method)
    def run(self: Borders, *args: Any, **named: Any) -> Any:
        if self.is_off or hook_calls.is_traced():
            return None
        try:
            return method(self, *args, **named)
        except Exception as error:  # noqa: BLE001  (the user's script must continue)
            self.is_off = True
            self.operations.leave()
            self.failed(f"values at borders can't be recorded ({type(error).__name__}: {error})")
            return None

    return run


class Borders:
    """Records the borders of one model, passing each to `write`.

    `failed` is called with the reason if the record has to end.
    """

    def __init__(
        self,
        model: nn.Module,
        write: Callable[[Border], None],
        settings: Settings,
        *,
        failed: Callable[[str], None],
    ) -> None:
        self._model, self._write, self._noise = model, write, settings.noise
        self.failed, self.is_off = failed, False
        self._sketches = Sketches()
        self._order = self._reserved = 0
        self._step, self._micro_batch = -1, -1  # -1 before the first pass
        self._calls: Counter[str] = Counter()
        self._stack: list[str] = []
        # By id, the tensors that have crossed a border in this forward pass, with their version,
        # and the names under which they did.
        self._known: dict[int, tuple[Tensor, int, list[Border]]] = {}
        self._rows: dict[str, int] = {}
        self._loss_scale = 1.0  # of the current backward pass; it is a power of two
        self._hooked: set[int] = set()
        self._before: dict[str, Tensor] = {}
        self.operations = Operations(self._operation, self._module, settings.operations)
        for name, module in model.named_modules():
            plain = tensors.plain_name(name)
            before, after = partial(self._enter, module, plain), partial(self._leave, module, plain)
            module.register_forward_pre_hook(OwnHook(module, before), with_kwargs=True)
            module.register_forward_hook(OwnHook(module, after), with_kwargs=True)

    def num_written(self) -> int:
        """Return the order of the last border."""
        return self._order

    # --- called by the observer -------------------------------------------------------------------

    @_quiet
    def begin_pass(self, step: int, micro_batch: int) -> None:
        """Record that a forward pass begins for this micro-batch of a step."""
        if self._step < 0:
            self._start(step)
        if (step, micro_batch) != (self._step, self._micro_batch):
            self._calls.clear()
            self._step, self._micro_batch = step, micro_batch
            for name, state in self._generators().items():
                self._write_exact(border_file.GENERATOR, name, state)
        self._stack.clear()
        self._known.clear()
        self._reserved, self._order = self._order, self._order + _RESERVED
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                hook = partial(self._parameter_gradient, tensors.plain_name(name))
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        self.operations.enter(step)

    @_quiet
    def loss(self, value: float | None, scale: float) -> None:
        """Record the value at which a backward pass begins. A scaler has multiplied it by `scale`.

        The gradients of the pass are recorded without the scale, too.
        """
        self._loss_scale = scale
        if value is not None and self._step >= 0:
            rows = max(self._rows.values(), default=1)
            self._write_numbers(border_file.LOSS, "loss", np.array([value]), rows, "float32")

    @_quiet
    def before_step(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record the settings of a step and the gradients that it applies."""
        if self._step < 0:
            self._start(step)
        self._step, self._micro_batch = step, -1
        rows = max(self._rows.values(), default=1)
        for name, parameter in self._trained():
            if parameter.grad is not None:
                gradient = parameter.grad
                self._value(border_file.APPLIED_GRADIENT, name, gradient, where=name, fan_in=rows)
            self._before[name] = tensors.local(parameter).clone()
        # After the gradients: a setting that differs explains only what comes after it.
        for name, numbers, parameters in _settings(self._model, optimizers):
            values = np.array(numbers)
            self._write_numbers(border_file.RATE, name, values, _SCHEDULE, "float64", parameters)

    @_quiet
    def after_step(self) -> None:
        """Record the updates of a step, and the weights and buffers after it."""
        for name, parameter in self._trained():
            before = self._before.pop(name, None)
            if before is not None and before.shape == tensors.local(parameter).shape:
                after = tensors.local(parameter)
                scale = float(torch.linalg.vector_norm(after.detach().float()))
                self._value(border_file.UPDATE, name, after - before, where=name, scale=scale)
        self._before.clear()
        self._state(self._step)
        self.operations.leave()

    # --- the state of the model -------------------------------------------------------------------

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield tensors.plain_name(name), parameter

    def _start(self, step: int) -> None:
        self._step = step
        for name, parameter in self._model.named_parameters():
            self._disturb(parameter, name)
        self._state(step, phase="start")

    def _state(self, step: int, *, phase: str = "update") -> None:
        self._step, self._micro_batch = step, -1
        for name, parameter in self._model.named_parameters():
            plain = tensors.plain_name(name)
            self._value(border_file.PARAMETER, plain, parameter, where=plain, phase=phase)
        for name, buffer in self._model.named_buffers():
            plain = tensors.plain_name(name)
            owner = plain.rpartition(".")[0]
            self._value(border_file.BUFFER, plain, buffer, where=owner, phase=phase)

    def _generators(self) -> dict[str, str]:
        states = generators.global_states()
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            state = torch.cuda.get_rng_state().numpy().tobytes()
            states["cuda"] = blake3(state).hexdigest(_DIGEST_BYTES)
        return states

    # --- hooks of modules -------------------------------------------------------------------------

    @_quiet
    def _enter(self, module: nn.Module, name: str, args: Any, named: Any) -> None:
        if not self._is_recording():
            return
        caller = self._stack[-1] if self._stack else ""
        call = self._calls[name]
        self._calls[name] += 1
        self._stack.append(name)
        self._inputs(module, name, call, caller, args, named)

    def _inputs(
        self,
        module: nn.Module,
        name: str,
        call: int,
        where: str,
        args: Any,
        named: Any,
        *,
        is_over: bool = False,
    ) -> None:
        is_root = module is self._model
        leaves = [*_tensors(args, ""), *_tensors(dict(sorted(named.items())), "")]
        if is_root:
            self._samples([leaf for _, leaf in leaves])
        for part, leaf in leaves:
            if is_root and not is_over:
                self._disturb(leaf, "input", part)
            fan_in = _fan_in(module, leaf)
            self._cross(border_file.INPUT, leaf, name, call, part, where, fan_in)

    @_quiet
    def _leave(self, module: nn.Module, name: str, args: Any, named: Any, output: Any) -> None:
        if not self._is_recording():
            return
        if name in self._stack:
            del self._stack[self._stack.index(name) :]
            call = self._calls[name] - 1
        else:  # hooks that are set during a call aren't called before it
            call = self._calls[name]
            self._calls[name] += 1
            order, self._order = self._order, self._reserved
            self._inputs(module, name, call, "", args, named, is_over=True)
            self._order = max(order, self._order)
        first = next((leaf for _, leaf in _tensors(args, "")), None)
        for part, leaf in _tensors(output, ""):
            if leaf.ndim and leaf.is_floating_point():
                self._rows[name] = max(1, leaf.numel() // max(1, leaf.shape[-1]))
            if id(leaf) not in self._known:
                self._disturb(leaf, name, call, part)
            fan_in = _fan_in(module, leaf if first is None else first)
            self._cross(border_file.OUTPUT, leaf, name, call, part, name, fan_in)
        if module is self._model:
            self._known = {}

    def _is_recording(self) -> bool:
        # A pass that is computed again within a backward pass (checkpointing) is known already.
        is_again = torch._C._current_graph_task_id() >= 0
        return self._step >= 0 and torch.is_grad_enabled() and not is_again

    def _module(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _cross(
        self, kind: str, leaf: Tensor, name: str, call: int, part: str, where: str, fan_in: int
    ) -> None:
        known = self._known.get(id(leaf))
        version = 0 if leaf.is_inference() else leaf._version
        if known is not None and known[1] == version:
            first, names = known[2][0], known[2]
            border = self._border(kind, name, first, call=call, part=part, where=where)
            names.append(border)
            return
        border = self._value(kind, name, leaf, call=call, part=part, where=where, fan_in=fan_in)
        names = [border]
        self._known[id(leaf)] = (leaf, version, names)
        if leaf.requires_grad and leaf.is_floating_point():
            leaf.register_hook(partial(self._gradient, names, self._module()))  # type: ignore[no-untyped-call]

    # --- hooks of tensors -------------------------------------------------------------------------

    @_quiet
    def _gradient(
        self, names: Sequence[Border], caller: str, gradient: Tensor | None
    ) -> Tensor | None:
        if gradient is None:  # an output of a compiled function that the loss doesn't use
            return None
        first = names[0]
        if self._noise is not None:
            gradient = gradient.clone()
            self._disturb(gradient, *first.key)
        # What has computed this gradient: the module that it was the input of, or else the code
        # around the module that it is the output of.
        users = [border.name for border in names if border.kind == border_file.INPUT]
        value = None
        for border in reversed(
            names
        ):  # the outermost output first: the model's own is the script's
            is_output = border.kind == border_file.OUTPUT
            kind = border_file.OUTPUT_GRADIENT if is_output else border_file.INPUT_GRADIENT
            place = {"call": border.call, "part": border.part, "phase": "backward"}
            where = _common(users) if users else caller
            if value is None:
                value = self._value(
                    kind,
                    border.name,
                    gradient,
                    where=where,
                    fan_in=first.fan_in,
                    divisor=self._loss_scale,
                    **place,
                )
            else:
                self._border(kind, border.name, value, where=where, **place)
        return gradient if self._noise is not None else None

    @_quiet
    def _parameter_gradient(self, name: str, gradient: Tensor) -> None:
        owner = name.rpartition(".")[0]
        rows = self._rows.get(owner) or max(self._rows.values(), default=1)
        self._value(
            border_file.PARAMETER_GRADIENT,
            name,
            gradient,
            fan_in=rows,
            where=owner,
            phase="backward",
            divisor=self._loss_scale,
        )

    # --- writing ----------------------------------------------------------------------------------

    def _value(
        self, kind: str, name: str, tensor: Tensor, *, divisor: float = 1.0, **place: Any
    ) -> Border:
        """Write the border of a tensor over `divisor`, of any shape and dtype, on any device."""
        plain = tensors.local(tensor)
        known, numbers, norm = self._numbers(plain)
        if divisor != 1.0 and numbers is not None:
            numbers, norm = numbers / divisor, norm / divisor
            known = blake3(numbers.tobytes()).hexdigest(_DIGEST_BYTES)
        scale = place.pop("scale", norm)
        border = self._new(
            kind,
            name,
            digest=known,
            numbers=numbers,
            scale=scale,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(plain.shape),
            **place,
        )
        self._write(border)
        return border

    def _numbers(self, plain: Tensor) -> tuple[str, NDArray[Any] | None, float]:
        """Return the digest of a tensor, its elements or projection, and its norm."""
        if plain.dtype not in DTYPES:
            return digest.digest(plain)[: 2 * _DIGEST_BYTES], None, 0.0
        if plain.numel() > VALUES_MAX:
            return self._projected(plain)
        wide = plain.double() if plain.dtype is torch.float64 else plain.float()
        numbers = wide.cpu().numpy().reshape(-1).copy()
        known = blake3(numbers.tobytes()).hexdigest(_DIGEST_BYTES)
        finite = numbers[np.isfinite(numbers)].astype(np.float64)
        return known, numbers, float(np.linalg.norm(finite)) if len(finite) else math.nan

    def _projected(self, plain: Tensor) -> tuple[str, NDArray[Any], float]:
        """Return the digest of a large tensor, the projection of its finite elements, and its norm.

        Which elements are not finite, as in masked scores, is added as the bits of a digest,
        each an infinity: these differ infinitely.
        """
        known, sketch = self._sketch(plain)
        if math.isfinite(sketch.square):
            return known, sketch.projected, float(sketch.square) ** 0.5
        infinite = plain.detach().sign().nan_to_num(nan=2.0).masked_fill(plain.isfinite(), 0.0)
        known, sketch = self._sketch(plain.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        place = digest.digest(infinite.to(torch.int8))[: 2 * _DIGEST_BYTES]
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(place), np.uint8))
        marked = np.where(bits, np.inf, -np.inf)
        known = f"{known[:_DIGEST_BYTES]}{place[:_DIGEST_BYTES]}"
        return known, np.append(sketch.projected, marked), float(sketch.square) ** 0.5

    def _sketch(self, plain: Tensor) -> tuple[str, Sketch]:
        record = self._sketches.records({"": plain}, {}, exact=False)[""]
        assert record.sketch is not None, "its dtype has sketches"
        return record.digest[: 2 * _DIGEST_BYTES], record.sketch

    def _border(self, kind: str, name: str, like: Border, **place: Any) -> Border:
        """Write the border of a value that is known under another name."""
        fields = {key: getattr(like, key) for key in ("digest", "numbers", "scale", "dtype")}
        border = self._new(kind, name, shape=like.shape, fan_in=like.fan_in, **fields, **place)
        self._write(border)
        return border

    def _write_numbers(
        self, kind: str, name: str, numbers: NDArray[Any], fan_in: int, dtype: str, text: str = ""
    ) -> None:
        known = blake3(numbers.tobytes()).hexdigest(_DIGEST_BYTES)
        scale = float(np.linalg.norm(numbers))
        self._write(
            self._new(
                *(kind, name),
                digest=known,
                numbers=numbers,
                scale=scale,
                shape=numbers.shape if text else (),
                fan_in=fan_in,
                dtype=dtype,
                text=text,
            )
        )

    def _write_exact(self, kind: str, name: str, known: str, text: str = "") -> None:
        self._write(self._new(kind, name, digest=known, text=text))

    def _new(self, kind: str, name: str, **fields: Any) -> Border:
        self._order += 1
        phase = "update" if self._micro_batch < 0 else "forward"
        fields = {"phase": phase, **fields}
        return Border(
            order=self._order,
            step=self._step,
            micro_batch=self._micro_batch,
            kind=kind,
            name=name,
            **fields,
        )

    def _samples(self, leaves: Sequence[Tensor]) -> None:
        """Write a digest for each row of the inputs, by which micro-batches are aligned."""
        shapes = [leaf.shape for leaf in leaves if leaf.ndim]
        if not shapes:
            return
        num_rows = shapes[0][0]
        by_row = [leaf for leaf in leaves if leaf.ndim and leaf.shape[0] == num_rows]
        rows = [
            blake3("".join(digest.digest(leaf[at]) for leaf in by_row).encode()).hexdigest(4)
            for at in range(num_rows)
        ]
        text = " ".join(rows)
        known = blake3(text.encode()).hexdigest(_DIGEST_BYTES)
        self._write_exact(border_file.SAMPLES, "samples", known, text)

    def _operation(self, outputs: Sequence[Tensor], name: str, **fields: Any) -> None:
        for part, output in enumerate(outputs):
            self._value(border_file.OPERATION, name, output, part=str(part), **fields)

    # --- noise ------------------------------------------------------------------------------------

    def _disturb(self, tensor: Tensor, *place: object) -> None:
        """Change the last bit of each element of a floating-point tensor, in place.

        The graph doesn't know: `.data` has a version of its own.
        """
        tensor = tensors.local(tensor)
        overlaps = any(
            size > 1 and not stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if self._noise is None or tensor.dtype not in DTYPES or overlaps:
            return
        step = () if self._step < 0 else (self._step, self._micro_batch)
        seed = zlib.crc32(" ".join(map(str, (self._noise, *step, *place))).encode())
        source = torch.Generator(tensor.device).manual_seed(seed)
        signs = torch.randint(
            0, 2, tensor.shape, generator=source, device=tensor.device, dtype=torch.int8
        )
        eps = torch.finfo(tensor.dtype).eps
        with torch.no_grad():
            tensor.data.mul_((2 * eps * signs.to(tensor.dtype)).add_(1 - eps))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value with their places: names of arguments, indices in tuples."""
    if isinstance(value, Tensor):
        yield path or "0", value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _tensors(inner, f"{path}{name}.")
    elif isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{path}{index}.")
    else:
        with suppress(Exception):  # a class of the script that pytree may know
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            yield from ((f"{path}{index}.", leaf) for index, leaf in enumerate(leaves))


def _common(users: Sequence[str]) -> str:
    """Return the module that uses a value, the innermost of nested ones, or what contains all."""
    paths = [user.split(".") if user else [] for user in users]
    inner = [path for path in paths if not any(path == p[: len(path)] != p for p in paths)]
    alike = takewhile(lambda parts: len({*parts}) == 1, zip(*inner, strict=False))
    return ".".join(parts[0] for parts in alike)


def _fan_in(module: nn.Module, tensor: Tensor) -> int:
    """Return the number of terms of the longest sum in a module's forward or backward pass."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim > 1:
        return max(weight.numel() // weight.shape[0], int(weight.shape[0]))
    return int(tensor.shape[-1]) if tensor.ndim else 1


def _settings(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, list[float], str]]:
    """Yield the numbers that decide what a step does, and the parameters that they belong to.

    Two versions of a script may divide parameters into other groups, so each parameter has its
    settings. A group without parameters of the model, as of copies, has its index in the name.
    """
    names = {id(each): tensors.plain_name(name) for name, each in model.named_parameters()}
    by_setting: dict[str, dict[str, float]] = {}
    held = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    for index, (group, parameters) in enumerate(zip(tensors.groups(optimizers), held, strict=True)):
        known = [names[id(each)] for each in parameters if id(each) in names]
        for name, number in _numbers_of(group):
            if known:
                by_setting.setdefault(name, {}).update(dict.fromkeys(known, number))
            else:
                yield f"group {index} {name}", [number], ""
    for setting, numbers in by_setting.items():
        in_order = [name for name in names.values() if name in numbers]
        yield setting, [numbers[name] for name in in_order], "\n".join(in_order)


def _numbers_of(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        if name in _KERNELS:
            continue
        numbers = value if isinstance(value, list) else [value]
        for at, number in enumerate(numbers):
            if isinstance(number, int | float):
                place = f"[{at}]" if isinstance(value, list) else ""
                yield f"{name}{place}", float(number)
