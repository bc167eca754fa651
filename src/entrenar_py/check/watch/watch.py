"""The watch of a training in production: weights are the same everywhere, finite, and moving.

After every k-th step of the optimizer, each rank sends the digests of its tensors to all ranks, and
`judge` compares them. On a GPU no step waits: digests are judged in the next watched step.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from entrenar_py.check.watch import clauses, digest, exchange
from entrenar_py.check.watch.digest_table import ROW_WORDS, DigestTable, places
from entrenar_py.check.watch.exchange import Exchange
from entrenar_py.check.watch.judge import Judge, Watched
from entrenar_py.check.watch.ownership import Parameters, local
from entrenar_py.shared import hook_calls
from entrenar_py.shared.errors import UsageError, WatchFinding

_LOG = logging.getLogger("entrenar_py")
_LIVE = 3  # the word of a row that says that the tensor should have moved


class Watch:
    """One rank's watch of a `model` without wrappers; all ranks watch the same steps.

    `observe` documents the arguments, and has validated them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        contract: str | Path | None,
        on_finding: Callable[[WatchFinding], None] | None,
        patience: int,
        step: int,
    ) -> None:
        self._optimizer = optimizer
        self._every, self._patience, self._step = every, patience, step
        self._clauses = clauses.select(contract)
        self._tell = _stop if on_finding is None else on_finding
        self._parameters = Parameters(model)
        if not self._parameters.names:
            raise UsageError("the model has no parameters to watch; leave every= out")
        self._judge: Judge | None = None
        self._pending: int | None = None  # the step whose rows were sent and not yet looked at
        self._table: DigestTable | None = None
        self._places: object = None
        self._asked: tuple[int, ...] | None = None
        hook_calls.leave_steps()
        self._hook = self._optimizer.register_step_post_hook(_AfterStep(self))
        atexit.register(self._leave)

    def watched(self) -> tuple[Watched, ...]:
        """Return for each clause how often it was checked, and what is not checked."""
        if self._judge is None:
            note = "no step was made yet"
            return tuple(Watched(id_, check, 0, 0, note) for check, id_ in self._clauses.items())
        return self._judge.watched()

    def close(self) -> None:
        """Judge the rows that were not judged yet, and stop watching."""
        self._hook.remove()
        atexit.unregister(self._leave)
        self._look()

    def _after_step(self) -> None:
        if self._judge is None:  # in every rank's first step, whatever its `every`
            self._open()
        step = self._step
        self._step += 1
        if self._step % self._every:
            return
        self._look()
        parameters = self._parameters.now()
        held = [local(parameter) for parameter in parameters]
        self._follow(held)
        rows = self._rows(held)
        self._mark(rows, parameters)
        self._exchange.send(rows)
        self._pending = step
        if not self._exchange.waits:
            self._look()

    def _look(self) -> None:
        step, self._pending = self._pending, None
        if step is not None:
            assert self._judge is not None
            for finding in self._judge.look(step, self._exchange.receive()):
                self._tell(finding)

    def _follow(self, tensors: Sequence[Tensor]) -> None:
        """Build the digest table again if tensors lie elsewhere in memory now."""
        now = places(tensors)
        if now == self._places:
            return
        self._places = now
        if self._parameters.pieces() != self._pieces:
            raise UsageError(
                "the parameters have other shapes, dtypes or shards than at the first "
                "step: close() this observation and observe() the model again"
            )
        devices = {tensor.device for tensor in tensors}
        on_gpu = len(devices) == 1 and tensors[0].device.type == "cuda"
        self._table = DigestTable(tensors) if on_gpu else None

    def _open(self) -> None:
        """Gather the pieces that each rank holds, and log what will not be watched.

        Raises UsageError if the ranks watch with different arguments.
        """
        self._pieces = self._parameters.pieces()
        own = (self._pieces, self._every, self._step, self._patience, dict(self._clauses))
        by_rank = exchange.tell(own)
        for rank, other in enumerate(by_rank):
            if other[1:] != own[1:]:
                raise UsageError(
                    "the ranks watch different things (every, step, patience, clauses): "
                    f"rank {rank} {other[1:]}, this rank {own[1:]}; give all ranks the same"
                )
        ranks = [pieces for pieces, *_ in by_rank]
        self._rank = torch.distributed.get_rank() if len(ranks) > 1 else 0
        self._judge = Judge(ranks, self._clauses, self._patience)
        device = local(self._parameters.now()[0]).device
        self._exchange = Exchange(max(map(len, ranks)), device)
        if self._rank == 0:
            for watched in self._judge.watched():
                if watched.note:
                    _LOG.warning("watch: %s (%s): %s", watched.clause, watched.check, watched.note)

    def _rows(self, held: Sequence[Tensor]) -> Tensor:
        """Return digest and flags of each tensor, int64 [tensors, ROW_WORDS]."""
        if self._table is not None:
            return self._table.run()
        roots = [digest.root(digest.header(tensor), digest.memory(tensor)) for tensor in held]
        rows = torch.zeros((len(held), ROW_WORDS), dtype=torch.int64)
        rows[:, :2] = digest.all_words(roots)
        rows[:, 2] = torch.tensor([not digest.is_finite(tensor) for tensor in held])
        return rows

    def _mark(self, rows: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Mark in `rows` the tensors that did not move last time and that this step should move."""
        assert self._judge is not None
        idle = self._judge.idle(self._rank)
        if not idle:
            return
        groups = self._optimizer.param_groups
        rates = {p: group.get("lr") for group in groups for p in group["params"]}
        asked: dict[object, dict[int, Tensor]] = {}  # row -> gradient, of each device and dtype
        for row in idle:
            parameter = parameters[row]
            if not parameter.requires_grad or parameter.grad is None:
                continue
            gradient = local(parameter.grad).detach()
            if not gradient.numel():
                continue
            # A parameter in no group has no rate, and is expected to move. A rate on a device isn't
            # read, as the host would have to wait for it.
            rate = rates.get(parameter)
            if not isinstance(rate, int | float) or rate > 0:
                asked.setdefault((gradient.device, gradient.dtype), {})[row] = gradient
        if asked:
            # One launch a dtype, not a tensor: hundreds may be idle.
            norms = [
                torch._foreach_norm([*gradients.values()], float("inf"))
                for gradients in asked.values()
            ]
            largest = torch.cat([torch.stack(norm).float().to(rows.device) for norm in norms])
            live = ((largest > 0) & largest.isfinite()).to(rows)
            places = self._places_of(tuple(chain.from_iterable(asked.values())), rows.device)
            rows[:, _LIVE].index_put_((places,), live)

    def _places_of(self, asked: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the row numbers `asked` as a tensor on `device`, copied without waiting if new."""
        if asked != self._asked:
            rows = torch.tensor(asked)
            rows = rows.pin_memory() if device.type == "cuda" else rows
            self._asked, self._index = asked, rows.to(device, non_blocking=True)
        return self._index

    def _leave(self) -> None:
        """Log findings of rows that have arrived, as the process ends without `close`.

        At that point nothing can be stopped any more, and nothing may hang.
        """
        if self._pending is not None and self._exchange.has_arrived():
            self._tell = lambda finding: _LOG.error("%s", finding)
            self._look()


def _stop(finding: WatchFinding) -> None:
    raise finding


class _AfterStep:
    """The hook of a watch. By `watches`, a recorder of the same optimizer lets it come last."""

    watches = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @hook_calls.ours
    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not (torch.compiler.is_compiling() or hook_calls.is_nested(optimizer)):
            self._watch._after_step()
