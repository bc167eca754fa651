"""The current optimizer step of a rank, and its gradients so far.

`GradientSources` tracks which backward passes each gradient contains when an optimizer applies it.
`ReducedGradients` has the gradients that a backward pass has left. `Clips` has the norm to which
the script clips, according to its calls. `StepHooks` are hooks that report when an optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from entrenar_py.check.observing import flat_parameters, tensors
from entrenar_py.check.observing.extra_state import ExtraState
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import hook_calls, trace


@dataclass
class _Source:
    """The backward passes in a parameter's gradient since the gradient was last seen cleared.

    `passes` are the passes, (step, micro-batch), that added to it. `first` is the step that first
    applied it with `digest`, if it was not changed since then; otherwise -1.
    """

    passes: list[tuple[int, int]] = field(default_factory=list)
    first: int = -1
    digest: str = ""
    is_applied: bool = False


class GradientSources:
    """Tracks which backward passes each gradient contains, by examining it before each pass.

    A gradient that is missing or all zeros at that time was cleared. A gradient that was applied
    and still has the same bits was not cleared.
    """

    def __init__(self, digest: Callable[[str, Tensor], str]) -> None:
        self._digest = digest  # digest(name, gradient) is the digest of the gradient's record
        self._sources: dict[str, _Source] = {}
        # Name -> micro-batches of the step that added to the gradient.
        self._given: dict[str, list[int]] = {}
        # Name -> micro-batches of the step that it contained when applied.
        self._held: dict[str, list[int]] = {}
        self._kept: dict[str, int] = {}

    def before_backward(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Record which gradients are cleared now."""
        for name, gradient in gradients.items():
            source = self._sources.get(name)
            if source is None:
                continue
            if gradient is None or not tensors.local(gradient).any():
                del self._sources[name]
            elif source.is_applied and source.digest != self._digest(name, gradient):
                source.first, source.is_applied = -1, False

    def after_backward(self, step: int, micro_batch: int, names: Iterable[str]) -> None:
        """Record that a backward pass has added to the gradients of the parameters `names`."""
        for name in names:
            source = self._sources.setdefault(name, _Source())
            source.passes.append((step, micro_batch))
            source.is_applied = False
            given = self._given.setdefault(name, [])
            if micro_batch not in given:
                given.append(micro_batch)

    def apply(
        self, step: int, gradients: Mapping[str, Tensor | None], known: trace.Tensors
    ) -> None:
        """Called when an optimizer is about to apply `gradients` in `step`.

        `known` are records of gradients that already exist.
        """
        for name, gradient in gradients.items():
            source = self._sources.get(name)
            if gradient is None or source is None:
                continue
            digest = known[name].digest if name in known else self._digest(name, gradient)
            if source.is_applied and source.digest != digest:
                source.first = -1
            if source.first >= 0:
                self._kept[name] = source.first
            else:
                source.first = step
                # Passes of steps in which the parameter's optimizer did not step, if there are any.
                early = [at for at, _ in source.passes if at < step]
                self._kept |= {name: min(early)} if early else {}
            self._held[name] = sorted({number for at, number in source.passes if at == step})
            source.passes.clear()
            source.digest, source.is_applied = digest, True

    def first_after(self, micro_batch: int, names: Iterable[str]) -> int | None:
        """Return the first pass to one of `names` from `micro_batch` on; None if there is none."""
        passes = {number for name in names for number in self._given.get(name, ())}
        return min((number for number in passes if number >= micro_batch), default=None)

    def take_ahead(self, step: int, first: int) -> dict[str, list[int]]:
        """Number the passes of `step` from `first` on as those of the next step, from 0.

        Return name -> the new numbers, for `give_ahead` when the step has ended.
        """
        for source in self._sources.values():
            source.passes = [
                (step + 1, number - first) if at == step and number >= first else (at, number)
                for at, number in source.passes
            ]
        ahead = {
            name: [number - first for number in numbers if number >= first]
            for name, numbers in self._given.items()
        }
        for name, numbers in self._given.items():
            self._given[name] = [number for number in numbers if number < first]
        return {name: numbers for name, numbers in ahead.items() if numbers}

    def give_ahead(self, ahead: Mapping[str, list[int]]) -> None:
        """Add the passes that `take_ahead` returned to the step that has just begun."""
        self._given |= ahead

    def forget_passes(self) -> None:
        """Forget the step's backward passes: the next pass repeats their samples."""
        self._given.clear()

    def end_step(self) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """Return `kept` and `summed` of the Update, and begin the next step."""
        summed = {
            name: tuple(held)
            for name, held in self._held.items()
            if held != sorted(self._given.get(name, ()))
        }
        kept = self._kept
        self._given, self._held, self._kept = {}, {}, {}
        return kept, summed


_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_EXACT = {"allreduce_hook", "noop_hook"}


class ReducedGradients:
    """The gradients that the last backward pass left, with changes that the script made in place.

    They are kept even after the script has cleared the parameters' gradients. `was_reduced` is true
    if the last backward pass should have reduced gradients, and left some (`fully_shard` hides
    unreduced ones).
    """

    def __init__(self) -> None:
        self._reduces = True
        self.was_reduced = True
        self._overflowed = False
        self._kept: dict[str, Tensor] = {}

    @property
    def left(self) -> Mapping[str, Tensor]:
        """Name -> gradient that the last backward pass left; {} if the pass didn't reduce them."""
        return self._kept

    def expect(self, called: nn.Module) -> None:
        """Determine, when a pass of `called` begins, whether its gradients will be reduced.

        Within a wrapper's `no_sync` they won't be; whether the forward pass is within it decides.
        """
        wrapper = _wrapper(called)
        self._reduces = wrapper is None or wrapper.require_backward_grad_sync
        if isinstance(called, FullyShardedDataParallel):
            self._reduces &= called._sync_gradients

    def look(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Keep the gradients that a backward pass left, if it reduced them."""
        left = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        self._kept = left if self._reduces else {}
        self.was_reduced = bool(self._kept)
        self._overflowed = not tensors.is_finite(self._kept.values())

    def has_overflowed(self) -> bool:
        """Return whether a reduced gradient is NaN or Inf now, or was when it was kept."""
        return self._overflowed or not tensors.is_finite(self._kept.values())

    def forget(self) -> None:
        """Forget the gradients: their step is completed."""
        self._kept, self._overflowed = {}, False


def compression(model: nn.Module) -> str:
    """Return the dtype to which gradients are rounded before ranks add them.

    The result is `float16`, `bfloat16`, the name of another communication hook of torch, or "" if
    gradients are not rounded. It is read from the hook of DistributedDataParallel, or from the
    mixed-precision policy of a sharded module, which may compute in 16 bits and add in 32. A
    `powerSGD_hook` adds the gradients of the first steps without rounding; it is recognised by its
    state, since a hook of the script may call it.
    """
    wrapper = _wrapper(model)
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        if isinstance(state, PowerSGDState):
            return "PowerSGD" if state.iter >= state.start_powerSGD_iter else ""
        name = str(getattr(hook, "__name__", ""))
        if getattr(hook, "__module__", "").startswith(_HOOKS) and name not in _EXACT:
            return {"fp16": "float16", "bf16": "bfloat16"}.get(name.partition("_")[0], name)
    formats = {name for module in model.modules() for name in _policy_formats(module)}
    formats |= flat_parameters.zero_formats(model)
    return next((name for name in ("bfloat16", "float16") if name in formats), "")


def _wrapper(called: nn.Module) -> DistributedDataParallel | None:
    # In compiled code, a wrapper that is about to be called is not the active one yet.
    active = DistributedDataParallel._active_ddp_module
    parts = (part for part in called.modules() if isinstance(part, DistributedDataParallel))
    return next(parts, None) if active is None else active


def _policy_formats(module: nn.Module) -> set[str]:
    """Return the dtypes in which a sharded module computes and reduces gradients."""
    formats: tuple[Any, ...] = ()
    if isinstance(module, FullyShardedDataParallel):
        if (handle := module._handle) is not None:
            formats = handle._fwd_bwd_param_dtype, handle._reduce_dtype
    elif isinstance(cast(object, module), FSDPModule):
        policy = cast(FSDPModule, module)._get_fsdp_state()._mp_policy
        formats = policy.param_dtype, policy.reduce_dtype
    return {str(name).removeprefix("torch.") for name in formats}


class Clips:
    """The norm to which a script clips, if it clips the whole gradient once per step.

    `limit` is None for other scripts: they clip parts to separate norms, clip micro-batches, or
    clip to a norm that changes or depends on the gradients.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        self._calls: list[tuple[frozenset[int], float | None]] = []
        self._is_steady = True

    def note(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float
    ) -> None:
        """Called when the gradients of `parameters` are clipped."""
        clipped = [parameters] if isinstance(parameters, Tensor) else parameters
        limit = float(max_norm)
        is_plain = float(norm_type) == 2 and 0 < limit < math.inf and limit == float(f"{limit:.2g}")
        self._calls.append((frozenset(map(id, clipped)), limit if is_plain else None))

    def forget(self) -> None:
        """Forget the clipping calls of a step that is skipped."""
        self._calls.clear()

    def end_step(self, stepped: Collection[Tensor]) -> None:
        """Called when a step was taken; `stepped` are its parameters with their gradients."""
        calls, self._calls = self._calls, []
        clipped, limit = calls[0] if len(calls) == 1 else (frozenset[int](), None)
        graded = {id(parameter) for parameter in stepped if parameter.grad is not None}
        is_first = self.limit is None
        self._is_steady &= limit is not None and (is_first or limit == self.limit)
        self._is_steady &= graded <= clipped
        self.limit = limit if self._is_steady else None


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepInWork:
    """Step `number` of the run; `stepped` has the indices of the optimizers that have stepped."""

    def __init__(self, subject: Subject, number: int, averages: Mapping[str, Any]) -> None:
        self._subject, self._extra = subject, ExtraState(subject, averages)
        self.number = number
        self.stepped: set[int] = set()
        self._stepped_before: set[int] = set()  # `stepped` when the current backward pass began
        # Name -> digest of the weights at the step's first pass.
        self._at_first_pass: dict[str, str] = {}
        self.sources = GradientSources(subject.digest)
        # Name -> last recorded weights, weights that the script has changed since then, and weights
        # that one of several optimizers has moved. `_due` are the names of the parameters that the
        # last optimizer steps.
        self._weights: trace.Tensors = {}
        self._edited: dict[str, trace.TensorRecord] = {}
        self._moved: dict[str, trace.TensorRecord] = {}
        self._due: list[str] = []
        self._gradient: dict[str, trace.TensorRecord] = {}
        self._unclipped: trace.Tensors = {}
        # The same of the optimizer step to come, which may begin another step; None: not recorded.
        self._unclipped_next: trace.Tensors | None = None
        self._reduced_next: tuple[trace.Tensors, float] | None = None
        # Weights that were moved along an earlier gradient of the step: name -> digest (`_uphill`),
        # names of those that still had this gradient (`_mixed`), and names of those that the
        # optimizer stepped from there (`_climbed`).
        self._uphill: dict[str, str] = {}
        self._mixed: set[str] = set()
        self._climbed: set[str] = set()
        # L2 norms before and after clipping, if the script calls `reduced`.
        self._norm: float | None = None
        self._applied_norm: float | None = None

    def reduced(self) -> None:
        """Record the gradients, which are those of the whole batch and not clipped yet."""
        gradients = self._subject.gradients()
        record = self._subject.record(gradients, exact=False)
        self._reduced_next = record, tensors.norm(gradients.values())

    def before_clipping(self) -> None:
        """Record the gradients before the script clips them by a torch function."""
        gradients = self._subject.applied_gradients()
        self._unclipped_next = self._subject.record(gradients, exact=False)

    def excuse(self) -> None:
        """Forget the gradients: they are not finite because the loss scale was too large."""
        self._gradient, self._unclipped, self._norm = {}, {}, None
        self.forget_told()

    def forget_told(self) -> None:
        """Forget what the script's calls have shown of gradients that are not applied."""
        self._unclipped_next = self._reduced_next = None

    def start(self, progress: Mapping[str, int]) -> trace.Start:
        """Return the record of this rank's state before the step."""
        start = self._subject.start(self.number, progress)
        self._weights = start.weights
        return replace(start, extra=self._extra.records())

    def before_backward(self) -> None:
        """Called when a backward pass begins: record which gradients are cleared."""
        self._stepped_before = {*self.stepped}
        self.sources.before_backward(self._subject.gradients())
        if not self._at_first_pass:
            self._at_first_pass = self._digests()

    def has_moved(self) -> bool:
        """Return whether weights were changed since the step's first backward pass began.

        False for a model that is recorded without values: examining it would take too long.
        """
        return self._at_first_pass != self._digests()

    def look_uphill(self, gradients: Mapping[str, Tensor]) -> None:
        """Record weights that were moved along `gradients`, which the step's last pass has left.

        Sharpness-aware scripts move weights in this way between two passes, and undo it before the
        step. Scripts that change weights before the step's first pass (to keep a bound, or for
        weight decay) are excluded, since such a change may only affect a few elements, along the
        gradient by chance.
        """
        if not self._subject.values:
            return
        gradients_now = self._subject.gradients()
        stayed = {n for n, at_first in self._at_first_pass.items() if self._is_last(n, at_first)}
        edited = self.edited_weights(gradients.keys() & stayed)
        for name, weights in edited.items():
            if name in self._uphill or not self._is_uphill(name, weights, gradients[name]):
                continue
            self._uphill[name] = weights.digest
            gradient = gradients_now[name]
            if gradient is not None and tensors.local(gradient).any():
                self._mixed.add(name)

    def _is_last(self, name: str, digest: str) -> bool:
        return name in self._weights and self._weights[name].digest == digest

    def _is_uphill(self, name: str, weights: trace.TensorRecord, gradient: Tensor) -> bool:
        """Return whether a tensor was moved only along its gradient, in at least one element."""
        along = self._subject.record({name: gradient})
        values = [one.values() for one in (weights, self._weights[name], *along.values())]
        known = [value for value in values if value is not None]
        if len(known) < 3 or len({value.shape for value in known}) > 1:
            return False
        now, before, slope = known
        moved = np.sign(now - before) * np.sign(slope)
        return bool((moved >= 0).all() and (moved > 0).any())

    def _digests(self) -> dict[str, str]:
        held = self._subject.trained if self._subject.values else {}
        return {name: record.digest for name, record in self._subject.record(held).items()}

    def is_over(self, names: Collection[str]) -> bool:
        """Return whether a pass that added to the parameters `names` belongs to the next step.

        It does if all optimizers of these parameters had already stepped when the pass began.
        """
        return bool(names) and self._stepped_names().issuperset(names)

    def has_stepped_any(self, names: Collection[str]) -> bool:
        """Return whether an optimizer of a parameter in `names` had stepped before the pass."""
        return not self._stepped_names().isdisjoint(names)

    def _stepped_names(self) -> set[str]:
        return {
            name
            for index in self._stepped_before & self.stepped
            for name in self._subject.stepped_by(index, alone=False)
        }

    def apply(self, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
        """Record the gradients that `optimizer` is about to apply to the parameters `names`."""
        self._take_told()
        gradients_now = self._subject.gradients()
        gradients = _unscaled(self._subject.applied_gradients(), optimizer)
        known: trace.Tensors = {}
        due = [*names]
        edited = self.edited_weights(due)
        self._edited |= edited
        # An optimizer of another library may restore weights within its step.
        if tensors.is_torch_s(optimizer):
            self._climbed |= {n for n, one in edited.items() if one.digest == self._uphill.get(n)}
        if self._norm is None:
            known = self._subject.record({name: gradients[name] for name in due}, exact=False)
            self._gradient |= known
        elif not self.stepped:
            self._applied_norm = tensors.norm(gradients.values())
        applied = {name: gradients_now[name] for name in due}
        known = {n: record for n, record in known.items() if gradients[n] is gradients_now[n]}
        self.sources.apply(self.number, applied, known)
        self._due = due

    def _take_told(self) -> None:
        """Take what the script's calls have shown of the gradients that are about to be applied."""
        if self._reduced_next is not None:
            record, self._norm = self._reduced_next
            self._gradient = dict(record)
        if self._unclipped_next is not None:
            self._unclipped = self._unclipped_next
        self._reduced_next = self._unclipped_next = None

    def apply_changed(self, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
        """Record the gradients of `names` again: `optimizer` has changed them within its step."""
        self._take_told()
        gradients = _unscaled(self._subject.applied_gradients(), optimizer)
        if self._norm is None:
            self._gradient |= self._subject.record({name: gradients[name] for name in names})

    def applied(self) -> None:
        """Record the weights that an optimizer has just moved, if there are several optimizers."""
        if len(self._subject.optimizers) > 1:
            parameters = self._subject.parameters
            moved = {name: parameters[name] for name in self._due if name in parameters}
            self._moved |= self._subject.record(moved)

    def end(self) -> trace.Update:
        """Return the record of this step, and begin the next one."""
        update = self._subject.update(self.number, self._gradient, self._norm, self._applied_norm)
        kept, summed = self.sources.end_step()
        weights = {**update.weights, **self._moved}
        update = replace(update, weights=weights, kept=kept, summed=summed, edited=self._edited)
        update = replace(update, extra=self._extra.records(), unclipped=self._unclipped)
        climbed, mixed = (tuple(sorted(names)) for names in (self._climbed, self._mixed))
        update = replace(update, climbed=climbed, mixed=mixed)
        self.number += 1
        self.stepped.clear()
        self._gradient, self._norm, self._applied_norm = {}, None, None
        self._unclipped = {}
        self._uphill, self._mixed, self._climbed = {}, set(), set()
        self._weights, self._edited, self._moved = update.weights, {}, {}
        self._at_first_pass = {}
        return update

    def written_back(self, update: trace.Update) -> trace.Update:
        """Return the last update with the current weights, which were written back meanwhile."""
        weights = self._subject.record(self._subject.parameters)
        finite = tensors.is_finite(self._subject.own_weights().values())
        self._weights = weights
        return replace(update, weights=weights, finite=finite)

    def forget_weights(self) -> None:
        """Forget the weights: ranks that train independently have just replaced them."""
        self._weights = {}

    def edited_weights(self, names: Iterable[str]) -> dict[str, trace.TensorRecord]:
        """Return records of the weights that were changed since their last record.

        If any weight was changed, and some are sharded, return records of all weights in `names`.
        """
        if not self._weights:
            return {}
        parameters = self._subject.parameters
        weights = {n: parameters[n] for n in names if n in parameters}
        # Sketch only the changed weights of a large model, since a sketch takes longer than a
        # digest.
        now = (
            self._subject.record(weights)
            if self._subject.values
            else self._subject.digests(weights)
        )
        edited = {
            name
            for name, record in now.items()
            if name in self._weights and self._weights[name].digest != record.digest
        }
        is_whole = edited and self._subject.pieces
        wanted = {n: w for n, w in weights.items() if is_whole or n in edited}
        return dict(self._subject.record(wanted)) if wanted else {}


def look_before_step(
    look: Callable[[], None],
    again: Callable[[], None],
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Arguments | None:
    """Call `look` when the gradients of a step exist: now, or after the step's closure has run.

    `arguments` and `named` are the arguments of the optimizer's step. If they include a closure,
    which computes the gradients within the step, return arguments with a wrapped closure. The
    wrapped closure calls `look` after its first run, and `again` after each later run (in LBFGS).
    Otherwise return None.
    """
    optimizer, *given = arguments
    closure = given[0] if given else named.get("closure")
    if closure is None:
        look()
        return None
    looked = False

    def run() -> Any:
        nonlocal looked
        loss = closure()
        if looked:
            again()
        else:
            look()
        looked = True
        return loss

    return (optimizer,), {**named, "closure": run}


class StepHooks:
    """Hooks of an optimizer's steps that run after the script's hooks.

    A hook of the script may reduce the gradients before a step, or write copies of the weights back
    after it. If a script compiles its steps, only the steps themselves are compiled, not the code
    around them that calls the hooks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, begins: Callable[..., Any], ends: Callable[..., Any]
    ) -> None:
        self._optimizer = optimizer
        self._begins, self._ends = hook_calls.outside(begins), hook_calls.outside(ends)
        hook_calls.leave_steps()
        self._set()

    def _set(self) -> None:
        self._before = self._optimizer.register_step_pre_hook(self._begins)
        self._after = self._optimizer.register_step_post_hook(self._ends)
        held = self._optimizer._optimizer_step_post_hooks
        for key in [key for key, hook in held.items() if _watches(hook)]:
            held[key] = held.pop(key)  # the watch's hook is last: it may raise

    def come_last(self) -> None:
        """Set our hooks again if the script has set hooks meanwhile; not allowed within a step."""
        hooks = (
            self._optimizer._optimizer_step_pre_hooks,
            self._optimizer._optimizer_step_post_hooks,
        )
        last = [
            next((key for key in reversed(held) if not _watches(held[key])), None) for held in hooks
        ]
        if last != [self._before.id, self._after.id]:
            self.remove()
            self._set()

    def remove(self) -> None:
        """Remove the hooks."""
        self._before.remove()
        self._after.remove()


class InnerSteps:
    """Observes an inner optimizer that takes the steps of an observed wrapper.

    The `step` of some wrappers is never called: sharpness-aware ones have two methods instead, and
    the second one steps the inner optimizer. Before the first step of the inner optimizer, `take`
    is called with the index of the wrapper in `optimizers`, and with the inner optimizer.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        take: Callable[[int, torch.optim.Optimizer], None],
    ) -> None:
        self._take = take
        self._outer = {
            inner: (index, optimizer)
            for index, optimizer in enumerate(optimizers)
            if not tensors.is_torch_s(optimizer)
            for inner in tensors.inner_optimizers(optimizer)
            if tensors.stepped_by(inner) == tensors.stepped_by(optimizer)
        }
        # A hook of all optimizers: an optimizer's own hook can't be set within its step.
        hook = hook_calls.outside(self._step_begins)
        self._hook = register_optimizer_step_pre_hook(hook) if self._outer else None

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in self._outer:
            return
        index, outer = self._outer[optimizer]
        if not hook_calls.is_stepping(outer):
            del self._outer[optimizer]
            self._take(index, optimizer)

    def remove(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()


def _watches(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "watches", False) is True


# --- attributes that a `GradScaler` sets on optimizers that unscale gradients (fused) -------------


def has_overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next step will change nothing because the loss scale was too large."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _unscaled(
    gradients: dict[str, Tensor | None], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor | None]:
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return gradients
    return {name: None if grad is None else grad / scale for name, grad in gradients.items()}
