"""Write down what a script calls, in the order in which calls begin.

A generator method follows each call: what is before its `yield` runs before the call. Errors of the
recorder don't reach the script (`guarded`); the record then ends with the reason. A process that
never computes a gradient leaves no record: launchers, workers of a loader.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from entrenar_py.check.anatomy import record
from entrenar_py.check.anatomy.record import Event, ranges
from entrenar_py.check.observing import FOLDER, call_sites, tensors
from entrenar_py.check.observing.auto.anatomy import parameters as reading
from entrenar_py.check.observing.auto.anatomy import surveys
from entrenar_py.check.observing.auto.anatomy.output import Output
from entrenar_py.check.observing.auto.anatomy.parameters import Parameters, rounded
from entrenar_py.check.observing.auto.anatomy.patches import COLLECTIVES
from entrenar_py.check.observing.auto.follower import Ending, guarded
from entrenar_py.check.observing.iterations import LoaderListener
from entrenar_py.check.observing.loss_terms import Losses
from entrenar_py.check.rank_files import notes
from entrenar_py.shared import hook_calls

Watching = Iterator[None]
SAMPLES_MAX = 64  # of a batch that are written
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_WITH_ONE_PEER = ("send", "recv", "isend", "irecv")
_GATHERING = ("all_gather", "all_gather_into_tensor")
_MEAN = 1e-6  # relative error of the product of float divisors
_DDP = "DistributedDataParallel"
_WITHIN_A_PASS = (
    "its optimizers step within backward passes, in hooks of gradients: the anatomy shows only "
    "steps after a pass; entrenar-check --auto judges such trainers, too"
)


class Recorder:
    """Follows the calls of torch's hooks and of the functions in `patches`."""

    def __init__(self, steps: int | None) -> None:
        self._steps, self._ending = steps, Ending()
        self._pid, self._is_off = os.getpid(), False
        self._output = Output()
        self.parameters = Parameters(self._output.write)
        self._numbers: dict[str, Any] = {}  # kind -> numbers of objects
        self._counts: dict[int, int] = {}  # steps by optimizer
        self._passes: Any = WeakIdKeyDictionary()  # loader -> passes
        self._inner: Any = WeakIdKeyDictionary()  # modules that a wrapper holds
        self._roots: Any = WeakIdKeyDictionary()  # of backward passes since the last step
        self._calls: list[tuple[nn.Module, Any]] = []  # modules that are being called
        self._hooks: tuple[Any, ...] = ()
        self._stepping: list[tuple[torch.optim.Optimizer, Any]] = []
        self._backward = self._quiet = self._exchanging = self._scaler = 0  # depths
        self._exchanges = self._sequence = 0  # collectives so far, and those that groups count
        self._unseen = 0  # collectives that no event tells yet
        self._synced: Any = WeakIdKeyDictionary()  # module -> collectives for its buffers
        self._reduced: list[tuple[list[int], float]] = []  # parameters, and the norm
        self._gathered: list[tuple[Any, Any]] = []
        self._changed_losses: list[tuple[Any, Any]] = []
        self._edited: set[int] | None = None  # changed between the last step and the first call
        self._is_scaled, self._wrapper, self._losses = False, "", Losses()
        self._site: call_sites.Site | None = None  # of the pass that runs now
        self._called_at: call_sites.Site | None = None  # of the outermost module's call
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._forked)

    def is_off(self) -> bool:
        """Return whether nothing is recorded in this process."""
        return self._is_off or torch.utils.data.get_worker_info() is not None

    def give_up(self, problem: str) -> None:
        """End the record."""
        self._is_off = True
        notes.write_problem(Path(os.environ[FOLDER]), problem)
        self._output.close(problem)

    @guarded
    def begins(self, method: str, *arguments: Any, **named: Any) -> Watching:
        """Run a method up to its `yield`."""
        watching: Watching = getattr(self, method)(*arguments, **named)
        next(watching, None)
        return watching

    @guarded
    def ends(self, watching: Watching | None) -> None:
        """Run the rest of a method."""
        if watching is not None:
            next(watching, None)

    def _forked(self) -> None:
        if self._counts or self._backward:
            self._is_off = True  # a loader's worker
        self._pid = os.getpid()

    def _leave(self) -> None:
        if os.getpid() == self._pid and not self._is_off:
            error = getattr(sys, "last_value", None)
            self._output.close("" if error is None else f"{type(error).__name__}: {error}")

    def _leave_if_due(self) -> None:
        if self._ending.is_due and not (self._backward or self._stepping or self._calls):
            self._ending.leave()

    def _emit(self, kind: type[Event], /, **facts: Any) -> None:
        self._output.write(self._event(kind, **facts))

    def _event(
        self, kind: type[Event], /, at: call_sites.Site | None = None, **facts: Any
    ) -> Event:
        file, line = at or surveys.site() or self._site or ("", 0)
        return kind(file=file, line=line, **facts)

    def _call(self, what: str, detail: str = "", number: int = -1) -> None:
        self._count_exchanges()
        facts = {"what": what, "detail": detail, "number": number}
        self._emit(record.Called, **facts, exchanges=self._exchanges)

    def _number(self, kind: str, thing: Any) -> int:
        numbers, count = self._numbers.setdefault(kind, (WeakIdKeyDictionary(), [0]))
        if thing not in numbers:
            numbers[thing] = count[0]
            count[0] += 1
        return int(numbers[thing])

    # --- batches ----------------------------------------------------------------------------------

    @guarded
    def iterated(self, loader: Any) -> LoaderListener:
        """Record that a loader is iterated, and return what hears its batches."""
        self._leave_if_due()
        count = self._passes.get(loader, -1) + 1
        self._passes[loader] = count
        sampler = surveys.sampler(loader)
        number = self._number("loader", loader)
        self._emit(
            record.PassBegun,
            loader=number,
            number=count,
            sampler=type(sampler).__name__,
            epoch=surveys.whole(getattr(sampler, "epoch", -1)),
            shuffles=bool(getattr(sampler, "shuffle", False)),
        )
        return _Pass(self, number, count)

    @guarded
    def draw(self, loader: int, number: int, index: Any, batch: Any) -> None:
        """Record a batch."""
        self._leave_if_due()
        listed = [*index] if isinstance(index, list | tuple) else [index]
        ids = [surveys.whole(each) for each in listed if surveys.whole(each) >= 0]
        leaves = surveys.leaves(batch)
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        self._emit(
            record.Drawn,
            loader=loader,
            number=number,
            samples=tuple(ids[:SAMPLES_MAX]),
            num_samples=len(ids) or next(iter(sizes), -1),
            shapes=reading.shapes(leaves),
        )

    @guarded
    def end_pass(self, loader: int, number: int, batches: int) -> None:
        """Record that a loader has no more batches."""
        self._emit(record.PassEnded, loader=loader, number=number, batches=batches)

    def set_epoch(self, _: Any, epoch: Any) -> Watching:
        """Record that a sampler is told its epoch."""
        self._call("set_epoch", str(epoch))
        yield

    def join(self, *_: Any) -> Watching:
        """Record that ranks may have different numbers of batches."""
        self._call("join")
        yield

    # --- modules ----------------------------------------------------------------------------------

    def hook_calls(self, wanted: bool) -> None:
        """Set or remove the hooks for the calls of all modules."""
        for hook in self._hooks:
            hook.remove()
        modules = nn.modules.module
        self._hooks = (
            ()
            if not wanted
            else (
                modules.register_module_forward_pre_hook(self.call_begins),
                modules.register_module_forward_hook(self.call_ended, always_call=True),
            )
        )

    @guarded
    def call_begins(self, module: nn.Module, inputs: Any) -> None:
        """Record that a module is called, if it is an outermost one."""
        trains = module.training and torch.is_grad_enabled()
        if trains:
            self._leave_if_due()
        if self._backward:
            return
        is_outermost, has_tensors = not self._calls, surveys.has_tensors(module)
        self._calls.append((module, None))
        if is_outermost and has_tensors:
            self.parameters.meet_module(module)
            self._note_unseen(None, "other")
            self._note_edits(trains)
            self._wrapper = surveys.wrapper(module) or self._wrapper
            self._called_at = surveys.site()
            before = surveys.Before(module, surveys.leaves((inputs, surveys.named_inputs())))
            self._calls[-1] = (module, (self._output.begin(), before))

    @guarded
    def call_ended(self, module: nn.Module, _: Any, output: Any) -> None:
        """Record that the call of a module has ended, perhaps with an exception."""
        if self._backward or not self._calls:
            return
        while (called := self._calls.pop())[0] is not module and self._calls:
            pass
        if called[1] is None:
            return
        place, before = called[1]
        self._note_unseen(module, "buffers")
        inner = module.module if isinstance(module, DistributedDataParallel) else None
        needs = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        event = self._event(
            record.Forward,
            module=self._number("module", module),
            kind=type(module).__name__ + (f"({type(inner).__name__})" if inner else ""),
            inner=self._number("module", inner) if inner else -1,
            outputs_grad=needs,
            was_inner=module in self._inner,
            **before.facts(module),
        )
        self._output.end(place, event)

    def call_compiled(self, module: nn.Module, *inputs: Any, **named: Any) -> Watching:
        """Record the call of compiled code; hooks for all modules are off during it."""
        self.call_begins(module, (inputs, named))
        self.hook_calls(False)
        yield
        self.hook_calls(True)
        # A parameter stands for the output, which requires a gradient if that does.
        trains = torch.is_grad_enabled()
        self.call_ended(module, (), next(module.parameters(), None) if trains else None)

    def wrap(self, wrapper: nn.Module, module: nn.Module, *_: Any, **__: Any) -> Watching:
        """Learn that a DistributedDataParallel is built around a module."""
        self._inner[module] = True
        yield
        self._count_exchanges()
        self._unseen = 0

    def restore(self, *_: Any, **__: Any) -> Watching:
        """Record that a module's state is loaded."""
        yield
        self._call("restore")

    def average(self, *_: Any, **__: Any) -> Watching:
        """Record that an average of weights is updated."""
        yield
        self._call("average")

    # --- backward passes --------------------------------------------------------------------------

    def backward(self, roots: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> Watching:
        """Record a backward pass; passes inside it belong to it."""
        self._leave_if_due()
        self._backward += 1
        if self._backward > 1:
            yield
            self._backward -= 1
            return
        self._site = surveys.site()
        self._note_unseen(None, "other")
        facts = self._root(roots, is_plain=grad_tensors is None)
        states = self.parameters.states()
        applied = {*self.parameters.applied_already(states)}
        place, exchanges = self._output.begin(), self._count_exchanges()
        yield
        self._backward = 0
        touched = self.parameters.touched(states)
        self._note_unseen(None, "gradients", touched)
        event = self._event(
            record.Backward,
            **facts,
            touched=ranges(touched),
            norm=rounded(self.parameters.norm(touched)),
            carried=ranges(applied & {*touched}),
            reduced=self._exchanges > exchanges,
        )
        self._output.end(place, event)
        self._site = None

    def _root(self, roots: Any, *, is_plain: bool) -> dict[str, Any]:
        """Return the facts about the tensor where a pass begins."""
        listed = roots if isinstance(roots, list | tuple) else (roots,)
        root = next((each for each in listed if isinstance(each, Tensor)), None)
        begun = self._losses.begun(roots, is_plain=is_plain)
        means = [abs(abs(share * count) - 1) < _MEAN for count, share, *_ in begun.terms if count]
        facts = {
            "shape": str([*root.shape]) if root is not None else "",
            "value": None if begun.value is None else rounded(begun.value),
            "node": type(root.grad_fn).__name__ if root is not None else "",
            "mean": all(means) if means else None,
            "again": root is not None and root in self._roots,
            "autocast": bool(surveys.autocast()),
            "gathered": any(surveys.is_cut_off(*each) for each in self._gathered),
            "changed_root": any(surveys.leads_to(root, *each) for each in self._changed_losses),
        }
        self._gathered, self._changed_losses = [], []
        if root is not None:
            self._roots[root] = True
        return facts

    # --- collectives ------------------------------------------------------------------------------

    def _count_exchanges(self) -> int:
        """Return how many collectives there were; those that no patch saw are counted now."""
        now = surveys.sequence()
        count = max(0, now - self._sequence)
        self._exchanges += count
        self._unseen += count
        self._sequence = now
        return self._exchanges

    def _note_unseen(self, module: nn.Module | None, contents: str, touched: Any = ()) -> None:
        """Write the collectives since the last count, which a wrapper has called in C++."""
        self._count_exchanges()
        unseen, self._unseen = self._unseen, 0
        if not unseen:
            return
        known = self.parameters.known()
        parts = [known[n] for n in touched if n in known]
        operation = "all_reduce" if contents == "gradients" else "broadcast"
        by = "other code" if contents == "other" else self._wrapper or "other code"
        if by != _DDP:
            operation = "exchange"  # gathers parameters, and scatters sums of gradients
            contents = contents if by == "FSDP" else "other"
        elif module is not None and not (parts := [*module.buffers()]):
            operation, contents = "rebuild_buckets", "other"
        elif module is not None:  # the second call also rebuilds the buckets
            unseen = min(unseen, self._synced.setdefault(module, unseen))
        self._emit(
            record.Collective,
            at=None if module is None else self._called_at,
            operation=operation,
            reduction="mean" if operation == "all_reduce" else "",
            by=by,
            size=dist.get_world_size(),
            tensor_bytes=sum(map(surveys.num_bytes, parts)),
            calls=unseen,
            contents=contents,
            touched=ranges(touched),
        )

    def exchange(self, name: str, arguments: Mapping[str, Any]) -> Watching:
        """Record a collective that Python code calls."""
        if name in _WITH_ONE_PEER:
            self._leave_if_due()  # the peer may have left
        self._exchanging += 1
        if self._exchanging > 1:
            yield
            self._exchanging -= 1
            return
        if self._backward:
            self._count_exchanges()  # a wrapper's, which are told when the pass has ended
        elif self._calls:
            self._note_unseen(self._calls[0][0], "buffers")
        else:
            self._note_unseen(None, "other")
        is_functional = "self" in arguments  # the result is a new tensor
        keys = ("self",) if is_functional else COLLECTIVES[name]
        values = tree_leaves([arguments.get(key) for key in keys])
        parts = [value for value in values if isinstance(value, Tensor)]
        contents, touched = self.parameters.contents(parts, self._buffers())
        self._note_cut_off(name, arguments)
        by = surveys.caller()
        event = self._event(
            record.Collective,
            operation=name,
            reduction=surveys.reduction(arguments) * (name in _REDUCING),
            by="a hook" if self._backward and by == "script" else by,
            size=surveys.group_size(arguments.get("group")),
            tensor_bytes=sum(map(surveys.num_bytes, parts)),
            contents=contents,
            touched=ranges(touched),
        )
        place = self._output.begin()
        unseen = self._unseen
        yield
        self._exchanging = 0
        self._count_exchanges()
        self._unseen = unseen
        if name in _REDUCING and contents == "gradients" and not is_functional:
            self._reduced.append((touched, tensors.norm(part.detach() for part in parts)))
            self.parameters.forget_places()
        self._output.end(place, event)

    def _note_cut_off(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Keep tensors of a graph that lose it, or that a reduction changes behind its back."""
        own = arguments.get("tensor", arguments.get("input_tensor"))
        if not (isinstance(own, Tensor) and own.grad_fn is not None and torch.is_grad_enabled()):
            return
        if name in _GATHERING and own.numel() > 1:
            outputs = arguments.get("tensor_list", arguments.get("output_tensor"))
            self._gathered.append((outputs, own))
        elif name in _IN_PLACE:
            self._changed_losses.append((own, own.grad_fn))

    def _buffers(self) -> Iterator[Tensor]:
        modules, _ = self._numbers.get("module", ((), None))
        for module in [*modules]:
            yield from module.buffers()

    # --- gradients between passes and steps -------------------------------------------------------

    def clear(self, owner: Any, *_: Any, **__: Any) -> Watching:
        """Record that gradients are cleared."""
        is_module = isinstance(owner, nn.Module)
        parameters = [*owner.parameters()] if is_module else surveys.stepped_by(owner)
        known = self.parameters.trained(self.parameters.of(parameters))
        present = len(self.parameters.present(known))
        yield
        self.parameters.forget_places()
        facts = {"owner": type(owner).__name__, "touched": ranges(known), "present": present}
        self._emit(record.Cleared, **facts)

    def clip(self, parameters: Any, max_norm: float, *_: Any, **__: Any) -> Watching:
        """Record that gradients are clipped."""
        clipped = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        graded = self.parameters.with_gradients(self.parameters.of(clipped))
        applied = self.parameters.applied_already(graded)
        before = self.parameters.norm(graded)
        yield
        self.parameters.renew(applied)
        self._emit(
            record.Clipped,
            most=float(max_norm),
            given=len(clipped),
            touched=ranges(graded),
            present=len(self.parameters.states()),
            before=rounded(before),
            after=rounded(self.parameters.norm(graded)),
            scaled=self._is_scaled,
            pieces=any(isinstance(each, DTensor) for each in clipped),
        )

    def scale(self, scaler: Any, outputs: Any) -> Watching:
        """Record that a scaler multiplies a loss."""
        if scaler.is_enabled():
            self._losses.scaled(scaler.get_scale(), outputs)
            self._is_scaled = True
            self._call("scale", f"{scaler.get_scale():g}")
        yield

    def unscale(self, _: Any, optimizer: torch.optim.Optimizer) -> Watching:
        """Record that a scaler divides the gradients of an optimizer."""
        numbers = self.parameters.of(surveys.stepped_by(optimizer))
        applied = self.parameters.applied_already(numbers)
        yield
        self.parameters.renew(applied)
        if self._is_scaled:
            self._is_scaled = False
            self._call("unscale", number=self._number("optimizer", optimizer))

    def step_scaler(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Watching:
        """Record that a scaler skips a step."""
        self._scaler += 1
        number = self._number("optimizer", optimizer)
        before = self._counts.get(number, 0)
        yield
        self._scaler = 0
        if scaler.is_enabled() and self._counts.get(number, 0) == before:
            self._call("skip", number=number)
        self._is_scaled = False

    def update_scaler(self, scaler: Any, *_: Any, **__: Any) -> Watching:
        """Record a scaler's scale after an update."""
        yield
        if scaler.is_enabled():
            self._call("update", f"{scaler.get_scale():g}")

    # --- optimizers and schedules -----------------------------------------------------------------

    def build(self, optimizer: Any, *_: Any, **__: Any) -> Watching:
        """Record that an optimizer is built."""
        yield
        number = self._number("optimizer", optimizer)
        parameters = ranges(self._meet(optimizer, number))
        self._call("built", f"{type(optimizer).__name__} {parameters}", number)

    def _meet(self, optimizer: Any, number: int) -> list[int]:
        named = enumerate(surveys.stepped_by(optimizer))
        labelled = ((f"optimizer {number}: {n}", tensor) for n, tensor in named)
        return self.parameters.meet(labelled, is_module=False)

    def _note_edits(self, wanted: bool) -> None:
        if wanted and self._edited is None:
            self._edited = {*self.parameters.edited()}

    @guarded
    def before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        """Record that an optimizer is about to step."""
        self._stepping = [pair for pair in self._stepping if hook_calls.is_stepping(pair[0])]
        self._leave_if_due()
        watching = None
        if not (self._stepping or self._backward):
            has_closure = len(arguments) > 1 or named.get("closure") is not None
            watching = self._step(optimizer, has_closure)
            next(watching, None)
        elif not (self._stepping or self._counts):
            notes.write_problem(Path(os.environ[FOLDER]), _WITHIN_A_PASS, notes.UNSEEN)
        self._stepping.append((optimizer, watching))

    @guarded
    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record that an optimizer has stepped."""
        while self._stepping:
            stepped, watching = self._stepping.pop()
            if stepped is optimizer:
                self.ends(watching)
                return

    def _step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> Watching:
        number = self._number("optimizer", optimizer)
        parameters = self.parameters.trained(self._meet(optimizer, number))
        self._note_unseen(None, "other")
        self._note_edits(True)
        # A closure computes the gradients: its calls come first.
        facts = {} if has_closure else self._applied(parameters)
        scaled = self._is_scaled and not self._scaler
        place, weights = self._output.begin(), self.parameters.weights(parameters)
        yield
        if has_closure:
            facts = self._applied(parameters)
            self._output.end(place, None)
            place = self._output.begin()
        self._roots, self._reduced = WeakIdKeyDictionary(), []
        self._is_scaled = self._is_scaled and bool(self._scaler)
        moved, after = self.parameters.stepped(weights)
        event = self._event(
            record.Stepped,
            optimizer=number,
            kind=type(optimizer).__name__,
            torchs=type(optimizer).__module__.startswith("torch."),
            held=ranges(parameters),
            moved=moved,
            weights=after,
            edited=ranges((self._edited or set()) & {*parameters}),
            rates=surveys.rates(optimizer),
            scaled=scaled,
            scaler=bool(self._scaler),
            **facts,
        )
        self._output.end(place, event)
        self._edited = (self._edited or set()) - {*parameters} or None
        self._counts[number] = self._counts.get(number, 0) + 1
        if self._steps is not None and max(self._counts.values()) >= self._steps:
            self._ending.is_due = True

    def _applied(self, parameters: list[int]) -> dict[str, Any]:
        """Return the facts about the gradients that a step applies."""
        graded = self.parameters.with_gradients(parameters)
        again = self.parameters.applied_already(graded)
        ratio = None
        if before := sum(norm * norm for _, norm in self._reduced) ** 0.5:
            now = self.parameters.norm({n for reduced, _ in self._reduced for n in reduced})
            ratio = rounded(now / before)
        norm = rounded(self.parameters.norm(graded))
        return {"graded": ranges(graded), "stale": ranges(again), "norm": norm, "ratio": ratio}

    def initialise_schedule(self, *_: Any) -> Watching:
        """Learn that a schedule calls its own step, as it is built."""
        self._quiet += 1
        yield
        self._quiet -= 1

    def step_schedule(self, schedule: Any, *_: Any, **__: Any) -> Watching:
        """Record that a schedule steps, unless another one steps it."""
        optimizer = getattr(schedule, "optimizer", None)
        is_own = not self._quiet and optimizer is not None
        before = surveys.rates(optimizer) if is_own else ()
        self._quiet += 1
        yield
        self._quiet -= 1
        if is_own:
            self._emit(
                record.Scheduled,
                schedule=self._number("schedule", schedule),
                kind=type(schedule).__name__,
                optimizer=self._number("optimizer", optimizer),
                before=before,
                after=surveys.rates(optimizer),
            )

    # --- files ------------------------------------------------------------------------------------

    def save(self, _: Any, f: Any = None, *__: Any, **___: Any) -> Watching:
        """Record that a file is saved."""
        yield
        self._call("save", surveys.path(f))

    def load(self, f: Any = None, *_: Any, **__: Any) -> Watching:
        """Record that a file is loaded."""
        self._call("load", surveys.path(f))
        yield


class _Pass:
    """One iteration over a loader: batches come in the order in which they were drawn."""

    def __init__(self, recorder: Recorder, loader: int, number: int) -> None:
        self._recorder, self._place = recorder, (loader, number)
        self._indices: deque[Any] = deque()
        self._batches = 0

    def drawn(self, index: Any) -> None:
        """Receive the indices of a later batch."""
        self._indices.append(index)

    def item(self, batch: Any) -> None:
        """Receive a batch."""
        index = self._indices.popleft() if self._indices else None
        self._batches += 1
        self._recorder.draw(*self._place, index, batch)

    def failed(self) -> None:
        """Learn that there is no batch."""

    def over(self) -> None:
        """Learn that there are no more batches."""
        self._recorder.end_pass(*self._place, self._batches)
