"""The loop of elastic training: a step is committed by all ranks or by none."""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.canonical import requirements
from entrenar_py.train.canonical.reducer import Counter, take
from entrenar_py.train.elastic.audit import Audit
from entrenar_py.train.elastic.buckets import Buckets
from entrenar_py.train.elastic.exchange import Exchange, Sum
from entrenar_py.train.elastic.group import (
    ConnectionLostError,
    Group,
    NcclGroup,
    Started,
    connect,
    prepare,
)
from entrenar_py.train.elastic.guard import Guard
from entrenar_py.train.elastic.launcher import seat_of_launcher
from entrenar_py.train.elastic.membership import (
    EndedError,
    Ending,
    Generation,
    InterruptedGenerationError,
    Membership,
)
from entrenar_py.train.elastic.transfer import broadcast, load

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Batch = TypeVar("Batch")

# What is drawn before the first micro-batch and after the last one, the same on all ranks.
_READING, _COMMITTING = -1, -2
_FAILURES_MAX = 5  # of the same ranks to commit a step
_OUTLIVING_S = 1.0


class ElasticTrainer:
    """The result of `entrenar_py.elastic`; its docstring shows how to use it.

    `step` counts committed steps. `rank`, `world_size` and `shards`, the global indices of this
    rank's micro-batches, change when ranks die or join: then `generation` is another one.
    `patience_s` is how long this rank waits for another one that is silent. It begins as
    `deadline_s`, and may be less in steps that a caller knows.
    """

    generation: Generation
    patience_s: float

    _is_made = False  # in this process, which has one seat

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        micro_batches: int,
        schedulers: Sequence[Any],
        state: Sequence[Any],
        first_step: int,
        seed: int,
        deadline_s: float,
        audit: float,
    ) -> None:
        requirements.require_deterministic()
        self._parameters = requirements.require_parameters(model)
        self._untrained = requirements.Untrained(model)
        self._model = model
        self._device = _device_of([*self._tensors().values()])
        _require_optimizer(optimizer, self._parameters)
        if not deadline_s > 0:
            raise UsageError.of("deadline_s", deadline_s, "give more than 0 seconds")
        if not 0 <= audit <= 1:
            raise UsageError.of("audit", audit, "give a share of all micro-batches, 0 to 1")
        if not isinstance(first_step, int) or first_step < 0:
            raise UsageError.of("first_step", first_step, "give the number of committed steps")
        seat = seat_of_launcher()
        requirements.require_micro_batches(micro_batches)
        if seat.num_seats > micro_batches:
            raise UsageError(
                f"micro_batches={micro_batches} with {seat.num_seats} ranks: every rank needs a "
                "micro-batch; start fewer ranks, or cut the global batch into more micro-batches"
            )
        if seat.num_seats > 1 and ElasticTrainer._is_made:
            raise UsageError("elastic() was called twice in this process: make one trainer for all")
        ElasticTrainer._is_made = True
        self._optimizer = optimizer
        self._schedulers, self._state = list(schedulers), list(state)
        self._micro_batches, self._seed, self._deadline_s = micro_batches, seed, deadline_s
        self.patience_s = deadline_s
        self._switches = requirements.switches()
        facts = {
            "micro_batches": micro_batches,
            "seed": seed,
            "audit": audit,
            "the shapes of the model's tensors": _fingerprint(model),
            **self._switches,
            **requirements.surroundings(self._device),
        }
        if seat.num_seats > 1:
            prepare(self._device)
        self._members = Membership(
            seat.store, seat=seat.seat, num_seats=seat.num_seats, facts=facts
        )
        if seat.num_seats > 1:  # it also keeps the group until then
            atexit.register(self._leave)
        self._audit = Audit(
            audit, micro_batches=micro_batches, seed=seed, parameters=self._parameters
        )
        self.step = first_step
        self._shard: int | None = None  # the current micro-batch
        self._reduced = False  # whether `.grad` is the mean over all micro-batches
        self._open = False  # between `steps` and `commit`
        self._broken = False  # whether an optimizer's step was not made to its end
        self._num_made = 0  # gradients in the current micro-batch
        self._as_made: dict[Tensor, tuple[int, int]] = {}  # a gradient, and its version
        self._ended = False  # whether all ranks have committed the last step
        self._trained = False  # whether this process has the state of the run
        self._failures: Counts[tuple[tuple[int, int], ...]] = Counts()  # by members, of this step
        self._client: Store | None = None  # of the store, for groups: a connection may take seconds
        self._counter = Counter()
        self._guard: Guard | None = None  # of the group
        self._use(None, None)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
        self._regroup()

    @property
    def shard(self) -> int:
        """The global index of the current micro-batch.

        Raises UsageError outside of a loop over `fold`.
        """
        if self._shard is None:
            raise UsageError("trainer.shard outside of the loop over fold(): read it inside of it")
        return self._shard

    @property
    def audited(self) -> int:
        """How many micro-batches two ranks computed, with the same bits, since this one joined."""
        return self._audit.num_audited

    def steps(self, total: int) -> Iterator[int]:
        """Yield the index of the next step until `total` steps are committed by all ranks.

        A step that nobody committed is yielded again. Raises LeftBehindError if the others have
        gone on without this process.
        """
        if self._ended:
            raise UsageError("steps() has ended the run: make one loop, over all epochs")
        while True:
            self._require_whole_state()
            if self.step >= total:
                if self._members.finish(deadline_s=self._deadline_s):
                    self._ended = True
                    self._close_guard()
                    if self._group is not None:
                        self._group.abort(lambda: True, self._deadline_s)
                    return
                self._regroup()
            elif self._members.pauses(self.step):
                # Without an interrupt: another rank may still receive the last of its gradients.
                self._regroup()
            else:
                self._open = True
                self._seed_generators(_READING)
                yield self.step
                if self._open:
                    raise UsageError(
                        f"step {self.step} was not committed: call trainer.commit() at the end of "
                        "the loop over steps()"
                    )

    def fold(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield this rank's micro-batches of `batches`. Run forward and backward on each.

        After them come those of other ranks that this rank audits. `shard` is then not in `shards`.
        Drops all gradients first. After the loop, each `.grad` is the mean over all micro-batches
        of all ranks, or None if the step can't be committed. Raises UsageError if `batches` doesn't
        have an item for each micro-batch of the global batch, if a micro-batch made no gradient for
        a parameter or changed a buffer, or if a setting in `requirements.switches` changed, or what
        `requirements.Parameters` checks.
        """
        self._require_whole_state()
        requirements.require_unchanged(self._switches)
        self._parameters.require_unchanged()
        if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
            raise UsageError(
                f"fold() got a {type(batches).__name__}: it needs a sequence of the step's "
                f"{self._micro_batches} micro-batches, such as a list, and reads only this rank's"
            )
        if len(batches) != self._micro_batches:
            raise UsageError(
                f"fold() got {len(batches)} micro-batches: it needs all {self._micro_batches} of "
                "the step, and reads only those of this rank"
            )
        if not self._open:
            raise UsageError("fold() outside of the loop over steps()")
        take(self._parameters)
        self._num_made = 0
        self._as_made.clear()
        self._reduced = False
        self._counter = Counter(self.shards.start)
        self._buckets.clear()
        try:
            for shard in (*self.shards, *self._audit.begin(self.step)):
                if self._members.interrupted:
                    return
                self._see()
                self._shard = shard
                self._seed_generators(shard)
                self._untrained.note()
                yield batches[shard]
                self._untrained.require_unchanged(shard)
                self._keep(shard)
            self._shard = None
            self._buckets.finish(self._wait)
            self._audit.settle(self._wait_for_valid)
            self._require_valid()
            self._seed_generators(_COMMITTING)  # for an optimizer with noise
            self._reduced = True
        except InterruptedGenerationError:
            take(self._parameters)
        except ConnectionLostError as error:
            self._members.interrupt(str(error))
            take(self._parameters)
        finally:
            self._shard = None
            self._counter.clear()

    def commit(self) -> bool:
        """Step the optimizer and the schedulers, and return True, if `.grad` is the mean.

        Otherwise form a new group with the ranks that are left, and return False: `steps` yields
        the step again. After an error of the optimizer or a scheduler the trainer can't be used.
        """
        if not self._open:
            raise UsageError("commit() outside of the loop over steps()")
        self._open = False
        if not self._reduced:
            if not self._members.interrupted:
                raise UsageError(
                    f"step {self.step} has no gradients: run the loop over fold() to its end "
                    "before commit()"
                )
            self._regroup()
            return False
        self._reduced = False
        self._broken = True
        self._optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self.step += 1
        self._broken = False
        self._failures.clear()
        return True

    def _require_whole_state(self) -> None:
        """Raise SystemFailure if the state is between two steps, which no rank can repeat."""
        if self._broken:
            raise SystemFailure(
                f"step {self.step} of the optimizer and schedulers failed, and may be half made: "
                "let this process end, and it gets the other ranks' state when it is started again"
            )

    def _seed_generators(self, shard: int) -> None:
        """Seed torch's generators for micro-batch `shard`, or for what surrounds them."""
        torch.manual_seed(_seed_of(self._seed, self.step, shard))

    # --- the gradients of a step ------------------------------------------------------------------

    def _made(self, parameter: Tensor) -> None:
        """Note that the backward pass has made the gradient of `parameter`."""
        self._see()
        self._num_made += 1
        if parameter.grad is not None:
            self._as_made[parameter] = id(parameter.grad), parameter.grad._version
        # An audited one is sent when all of it is there: its sums would change it.
        if self._shard == self.shards[-1] and self._shard not in self._audit:
            self._send(parameter)

    def _send(self, parameter: Tensor) -> None:
        if parameter.grad is None or self._members.interrupted:
            return
        try:
            self._buckets.add(parameter, self._counter)
        except ConnectionLostError as error:
            self._members.interrupt(str(error))

    def _keep(self, shard: int) -> None:
        """Check that `shard` has every gradient. Keep them, if it is not the last or an audit."""
        if self._members.interrupted:
            raise InterruptedGenerationError
        last = shard == self.shards[-1]
        if shard in self._audit:
            self._audit.keep(shard)
            for parameter in self._parameters if last else ():
                self._send(parameter)
            if self._members.interrupted:  # meanwhile, so not all were sent
                raise InterruptedGenerationError
        changed = [
            self._parameters[weight]
            for weight, made in self._as_made.items()
            if weight.grad is not None and (id(weight.grad), weight.grad._version) != made
        ]
        self._as_made.clear()
        node = take(self._parameters)  # the last one's are in buckets already
        num_made, self._num_made = self._num_made, 0
        if num_made > len(self._parameters):
            raise UsageError(
                f"a second backward pass in micro-batch {shard}: each micro-batch has one; add its "
                "losses, and call backward() on the sum"
            )
        missing = self._buckets.missing() if last else self._parameters.keys() - node.keys()
        if missing:
            names = sorted(self._parameters[one] for one in missing)
            raise UsageError(
                f"micro-batch {shard}, of this rank's {self.shards.start} to "
                f"{self.shards.stop - 1}, made no gradient for {names[0]} ({len(names)} of "
                f"{len(self._parameters)} parameters): run its backward pass inside the loop over "
                "fold(), and let it use every parameter"
            )
        if changed:
            raise UsageError(
                f"the gradient of {changed[0]} was changed after the backward pass of micro-batch "
                f"{shard} ({len(changed)} of {len(self._parameters)} parameters): others are "
                "summed already; clip or scale gradients after the loop over fold(), where they "
                "are the mean"
            )
        if not last and shard in self.shards:
            self._counter.push(node)

    def _wait(self, started: Started) -> None:
        """Wait for a collective.

        Raises InterruptedGenerationError if it can't end, and ConnectionLostError if it has failed.
        """

        def is_over() -> bool:
            self._see()
            return started.is_over()

        self._members.wait(is_over, deadline_s=self.patience_s, what="an exchange between ranks")
        started.check()

    def _wait_for_valid(self, started: Started) -> None:
        """Wait for a collective, and refuse what a cut may have left. Raises as `_wait`."""
        self._wait(started)
        self._require_valid()

    def _require_valid(self) -> None:
        """Raise InterruptedGenerationError if what was received may be garbage.

        Where one rank cuts an exchange, it may end on another with garbage, and without an error.
        """
        if self._ending is not None and self._ending.is_void():
            self._members.interrupt("an exchange between ranks was cut")
            raise InterruptedGenerationError

    def _see(self) -> None:
        if self._guard is not None:
            self._guard.see()

    def _leave(self) -> None:
        """Say, before this process ends, that exchanges in flight end with it."""
        if not self._ended and self._ending is not None:
            with suppress(RuntimeError):  # without a store nobody can commit
                self._ending.void()

    def _close_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    # --- another set of ranks ---------------------------------------------------------------------

    def _regroup(self) -> None:
        """Form a group of all ranks that are there. All get the state of the most advanced one."""
        self._require_whole_state()
        take(self._parameters)
        while True:
            self._close_guard()
            try:
                try:
                    generation = self._members.agree(
                        self.step, trained=self._trained, deadline_s=self.patience_s
                    )
                finally:
                    # Not before: another rank may still receive what this one has sent.
                    self._abandon()
                self._tell(generation)
                self._use(self._connect(generation), generation)
                if isinstance(self._group, NcclGroup):
                    self._guard = Guard(
                        self._group, self._members.ending(), lambda: self.patience_s
                    )
                if generation.behind:
                    self._bring_up(generation)
            except InterruptedGenerationError:
                continue
            except ConnectionLostError as error:
                self._members.interrupt(str(error))
                continue
            except EndedError:
                printing.warn("entrenar_py.elastic: the run ended before this rank joined")
                raise SystemExit(0) from None
            break
        self._trained, self.generation = True, generation
        self._audit.join(generation, self._group, self._members)

    def _tell(self, generation: Generation) -> None:
        """Warn of the last generation's end. Raises SystemFailure if that was in vain too often.

        A death makes other members. The same ones again should get further.
        """
        reason = self._members.why_ended(generation.number - 1)
        if reason is None:
            return
        self._failures[generation.members] += 1
        me = (self._members.seat, self._members.incarnation)
        if generation.members[generation.source] == me:
            printing.warn(f"entrenar_py.elastic: repeats step {self.step}, since {reason}")
        if self._failures[generation.members] > _FAILURES_MAX:
            raise SystemFailure(
                f"the same ranks began step {self.step} {_FAILURES_MAX} times, and did not commit "
                f"it: {reason}"
            )

    def _use(self, group: Group | None, generation: Generation | None) -> None:
        """Exchange gradients over `group` from now on. Without a generation this rank is alone."""
        members = generation.members if generation else ()
        self.world_size = max(len(members), 1)
        self.rank = members.index((self._members.seat, self._members.incarnation)) if members else 0
        self._group = group
        self._ending: Ending | None = None if group is None else self._members.ending()
        exchange = Exchange(
            group, rank=self.rank, world_size=self.world_size, micro_batches=self._micro_batches
        )
        self.shards = exchange.shards
        self._buckets = Buckets(list(self._parameters), exchange)

    def _connect(self, generation: Generation) -> Group | None:
        """Return a new process group of the generation's members, or None for a single one.

        It is made in a thread, since a member that ends meanwhile would make it wait in vain.
        """
        world_size = len(generation.members)
        if world_size == 1:
            return None
        rank = generation.members.index((self._members.seat, self._members.incarnation))
        client, self._client = self._client, None  # the thread below may never give it back
        unconnected, ended = list[NcclGroup](), list[Group | Exception]()
        ending = self._members.ending()
        is_wanted, lock = True, threading.Lock()

        def begin(group: NcclGroup) -> None:
            with lock:
                unconnected.append(group)
                if not is_wanted:
                    raise ConnectionLostError("the generation has ended")

        def connect_all() -> None:
            try:
                store = client or self._members.roll.clone()
                group = connect(
                    PrefixStore(f"group/{generation.number}", store),
                    self._device,
                    rank=rank,
                    world_size=world_size,
                    timeout_s=2 * self._deadline_s,
                    announce=begin,
                )
            except Exception as error:  # noqa: BLE001  # the other thread raises it
                ended.append(error)
                return
            with lock:
                if is_wanted:
                    self._client = store
                    ended.append(group)
                    return
            ending.void()
            group.abort(lambda: True, self._deadline_s)

        threading.Thread(target=connect_all, name="entrenar-elastic-connect", daemon=True).start()
        try:
            self._members.wait(lambda: bool(ended), deadline_s=self._deadline_s, what="connecting")
        except InterruptedGenerationError:
            with lock:
                is_wanted = False
            if not (ended and isinstance(ended[0], Group)):
                ending.void()
                for one in unconnected:  # in a thread, as it may wait for the one above
                    threading.Thread(target=one.cut, daemon=True).start()
                raise
        match ended[0]:
            case RuntimeError() as error:
                raise ConnectionLostError(f"a rank could not connect: {error}") from error
            case Exception() as error:
                raise error
            case group:
                return group

    def _abandon(self) -> None:
        """Abort the exchanges of the group, or leave them to a thread: they may still write."""
        group, ending, sums = self._group, self._ending, self._buckets.sums
        self._use(None, None)
        if group is None or ending is None:
            return
        ending.void()
        group.abort(lambda: all(one.is_over for one in sums), self._deadline_s)
        threading.Thread(
            target=_outlive, args=(group, sums), name="entrenar-elastic-end", daemon=True
        ).start()

    def _bring_up(self, generation: Generation) -> None:
        """Copy the state of rank `source` to the ranks that are behind."""
        assert self._group is not None
        states = [self._optimizer, *self._schedulers, *self._state, *_with_extra_state(self._model)]
        own = None
        if self.rank == generation.source:
            own = (self.step, self._tensors(), [each.state_dict() for each in states])
        is_behind = self.rank in generation.behind
        sent = broadcast(
            own,
            self._group,
            source=generation.source,
            wait=self._wait_for_valid,
            keeps=is_behind,
        )
        if not is_behind:
            return
        self._require_valid()
        # All of it is here: nothing can interrupt the rest, and no rank has half of a state.
        self.step, tensors, dicts = sent
        self._take(tensors)
        for holder, state in zip(states, dicts, strict=True):
            load(holder, state)

    def _tensors(self) -> dict[str, Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: one.detach() for name, one in named}

    def _take(self, tensors: dict[str, Tensor]) -> None:
        """Take another rank's weights and buffers. Its caches may be filled, or longer."""
        own = self._tensors()
        for name, theirs in tensors.items():
            if name in own and own[name].shape == theirs.shape and not _is_expanded(own[name]):
                own[name].copy_(theirs)
            else:
                place, _, last = name.rpartition(".")
                module = self._model.get_submodule(place)
                if (weight := module._parameters.get(last)) is not None:
                    weight.data = theirs
                else:
                    module._buffers[last] = theirs


def _outlive(group: Group, sums: list[Sum]) -> None:
    """Keep a group and the memory of its exchanges until they are over. Both end in this thread.

    The end of a group of gloo waits for its exchanges. The caller drops what it holds meanwhile.
    """
    time.sleep(_OUTLIVING_S)
    while not all(one.is_over for one in sums):
        time.sleep(_OUTLIVING_S)


class _ExtraState:
    """The state that a module has besides parameters and buffers, by its own two functions."""

    def __init__(self, module: nn.Module) -> None:
        self.state_dict, self.load_state_dict = module.get_extra_state, module.set_extra_state


def _with_extra_state(model: nn.Module) -> list[_ExtraState]:
    usual = nn.Module.get_extra_state
    return [_ExtraState(one) for one in model.modules() if type(one).get_extra_state is not usual]


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements are one number in memory, to which nothing can be copied."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return where all `tensors` are. Raises UsageError unless it is one GPU, or the CPU."""
    devices = sorted({str(one.device) for one in tensors})
    if len(devices) > 1 or tensors[0].device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the model is on {', '.join(devices)}: elastic training needs all of it on one "
            "CUDA device, or on the CPU"
        )
    return tensors[0].device


def _require_optimizer(optimizer: object, parameters: requirements.Parameters) -> None:
    """Raise UsageError unless `optimizer` is one, for parameters that are reduced."""
    if not callable(getattr(optimizer, "step", None)):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}: give one object with step(), state_dict() "
            "and load_state_dict(), which may step several optimizers"
        )
    groups = getattr(optimizer, "param_groups", ())
    for number, weight in enumerate(chain.from_iterable(group["params"] for group in groups)):
        if weight.requires_grad and weight not in parameters:
            raise UsageError(
                f"parameter {number} of the optimizer, {tuple(weight.shape)}, is not the "
                "model's, so its gradient would not be reduced: put all that is trained, such as a "
                "loss with weights, into one module, and make the optimizer from its parameters()"
            )


def _fingerprint(model: nn.Module) -> str:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(one.shape), str(one.dtype)) for name, one in tensors]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _seed_of(seed: int, step: int, shard: int) -> int:
    """Return the seed of a micro-batch's randomness: any two have unrelated ones."""
    digest = hashlib.sha256(f"{seed},{step},{shard}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
