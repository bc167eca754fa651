"""Records which tokens contribute to a language model's losses, and probes the model.

Both happen only if a contract requires them. Micro-batches are examined after the optimizer has
stepped: then no forward or backward pass is in progress, and the model is in the state of the next
step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.check.observing import (
    TOKENS,
    flat_parameters,
    generators,
    tensors,
    token_probe,
    tokens,
)
from entrenar_py.check.observing.generators import Generators, States
from entrenar_py.check.observing.subject import Subject
from entrenar_py.check.observing.token_probe import Probe, Table
from entrenar_py.check.observing.tokens import Arguments, Loss, Place, Rows
from entrenar_py.shared import trace

# The recorded steps after which the model is probed, counted from 0. After the first one the model
# may still have weights of zero, which hide dependencies.
PROBED = (0, 2)
_BEGIN, _END = "bos_token_id", ("eos_token_id", "pad_token_id")


@dataclass
class _Pass:
    """A training forward pass, and the losses that were computed after it."""

    micro_batch: int
    arguments: Arguments
    autocast: Callable[[], AbstractContextManager[Any]]
    autocast_dtype: torch.dtype | None
    losses: list[Loss] = field(default_factory=list)
    place: Place | None = None  # the place of the pass's last loss over its tokens


class Language:
    """Ignores all micro-batches, because no contract requires token records."""

    def forward(self, model: nn.Module, inputs: Sequence[Any], micro_batch: int) -> None:
        """Called when a forward pass of `model` begins; `inputs` are its args and kwargs."""

    def aside(self, model: nn.Module) -> None:
        """Called when a forward pass of `model` without gradients begins."""

    def stepped(self, step: int) -> None:
        """Record the micro-batches of `step`; after some steps, also probe the model."""

    def remove(self) -> None:
        """Stop observing."""


class Looking(Language):
    """Examines a rank's micro-batches, and passes the resulting events to `write`.

    `were_recomputed` returns whether modules were called in a backward pass since its last call.
    """

    def __init__(
        self,
        subject: Subject,
        generators: Generators,
        write: Callable[[Sequence[trace.Event]], object],
        were_recomputed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._subject, self._generators, self._write = subject, generators, write
        self._were_recomputed = were_recomputed
        self._rank = subject.rank
        self._passes: list[_Pass] = []
        self._num_steps = 0
        self._table: Table | None = None
        self._problem = ""
        self._is_probing = False
        self._leave: Callable[[], None] = lambda: None
        # The mode and the generators' states of the last pass, if that had no gradients; otherwise
        # None.
        self._aside: tuple[bool, States] | None = None
        self._evaluated: list[trace.Evaluated] = []
        self._last_step = -1

    def listen(self) -> None:
        """Observe the losses of this process, which all come from passes of this rank."""
        self._leave = tokens.listen(self.scored)

    def remove(self) -> None:
        self._leave()
        self._write_evaluated()

    def aside(self, model: nn.Module) -> None:
        self._aside = None if self._is_probing else (model.training, self._generators.states())

    def forward(self, model: nn.Module, inputs: Sequence[Any], micro_batch: int) -> None:
        self._aside = None
        if torch._C._current_graph_task_id() != -1:
            # A checkpoint around the whole model: its first pass has no gradients.
            self._evaluated.clear()
        if self._is_probing or (self._problem and self._table is None):
            return
        args, kwargs = inputs
        if not args and not kwargs:
            return  # the observation began during this pass
        again = self._table is None or self._num_steps in PROBED
        arguments = Arguments(model, args, kwargs, again=again)
        device = next((p.device.type for p in model.parameters()), "cpu")
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        dtype = None
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            autocast = partial(torch.autocast, device, dtype=dtype)
        self._passes.append(_Pass(micro_batch, arguments, autocast, dtype))

    def scored(self, loss: Loss) -> None:
        """Record a loss of the last pass."""
        if self._is_probing:
            return
        if loss.is_trained and self._passes:
            self._passes[-1].losses.append(loss)
        elif not loss.is_trained and loss.reduction != "none" and self._aside is not None:
            training, before = self._aside
            self._evaluated.append(
                trace.Evaluated(
                    step=self._last_step + 1,
                    rank=self._rank,
                    counted=int(loss.counted.sum()),
                    training=training,
                    drew=bool(generators.moved(before, self._generators.states())),
                )
            )

    def _write_evaluated(self) -> None:
        evaluated, self._evaluated = self._evaluated, []
        if evaluated:
            self._write(evaluated)

    def stepped(self, step: int) -> None:
        self._last_step = step
        self._write_evaluated()
        passes, self._passes = self._passes, []
        if not passes or (self._problem and self._table is None):
            return
        number, self._num_steps = self._num_steps, self._num_steps + 1
        if self._table is None:
            self._problem = self._find_table(passes[0])
        known = [(one, rows) for one in passes if (rows := self._rows(one)) is not None]
        if not known:
            why = self._problem or "the arguments with the token ids change"
            self._write([self._tokens(step, passes[0], None, why)])
            return
        self._write([*self._losses(step, known)])
        if number in PROBED:
            self._write(self._probed(step, *max(known, key=lambda one: _interest(one[1]))))

    # --- what is recorded -------------------------------------------------------------------------

    def _losses(self, step: int, known: Iterable[tuple[_Pass, Rows]]) -> Iterator[trace.Event]:
        for passed, rows in known:
            place = {"step": step, "rank": self._rank, "micro_batch": passed.micro_batch}
            for call, loss in enumerate(passed.losses):
                found = tokens.scored_event(loss, rows, call=call, **place)
                if found is not None:
                    event, passed.place = found
                    yield event

    def _probed(self, step: int, passed: _Pass, rows: Rows) -> list[trace.Event]:
        assert self._table is not None, "the rows come from there"
        place = {"step": step, "rank": self._rank, "micro_batch": passed.micro_batch}
        events: list[trace.Event] = []

        def look(probe: Probe) -> None:
            assert self._table is not None
            dimension = 1 if passed.place is None else passed.place.dimension
            counted = (
                torch.ones_like(rows.padding) if passed.place is None else passed.place.counted
            )
            events.extend(probe.events(rows, self._table.place, dimension, counted, **place))

        problem = self._problem or self._pass_again(passed, look)
        return [self._tokens(step, passed, rows, problem), *events]

    def _tokens(self, step: int, passed: _Pass, rows: Rows | None, problem: str) -> trace.Tokens:
        if rows is None:
            return trace.Tokens(
                step=step,
                rank=self._rank,
                micro_batch=passed.micro_batch,
                rows=0,
                positions=0,
                recomputed=self._were_recomputed(),
                problem=problem,
            )
        begun, doubled = _beginnings(self._model, rows)
        return trace.Tokens(
            step=step,
            rank=self._rank,
            micro_batch=passed.micro_batch,
            rows=len(rows.ids),
            positions=rows.ids.shape[1],
            padding=int(rows.padding.sum()),
            documents=0 if rows.documents is None else int((rows.documents.amax(1) + 1).sum()),
            shown=rows.shown,
            begun=begun,
            doubled=doubled,
            tied=_tied(self._model),
            recomputed=self._were_recomputed(),
            problem=problem,
        )

    # --- passes for the probe ---------------------------------------------------------------------

    @property
    def _model(self) -> nn.Module:
        return self._subject.model

    def _why_not(self, passed: _Pass) -> str:
        """Return why the model's pass can't be repeated; "" if it can."""
        if torch._C._current_graph_task_id() != -1:
            return "an optimizer steps inside of the backward pass"
        if flat_parameters.is_fully_sharded(self._model):
            return "its weights are sharded, and are gathered only for the script's own passes"
        if passed.arguments.has_cache:
            return "it is given a cache"
        if hooked := token_probe.own_hook(self._model):
            return f"the script has set a hook on {hooked}, which may count passes"
        return ""

    def _find_table(self, passed: _Pass) -> str:
        """Find the model argument with the token ids.

        Return why the model's pass can't be repeated; "" if it can.
        """

        def look(probe: Probe) -> None:
            self._table = probe.table()

        problem = self._why_not(passed) or self._pass_again(passed, look)
        if problem:
            place = passed.arguments.guessed()
            self._table = None if place is None else Table(place, None)
        return problem or ("" if self._table else "it is given no token ids")

    def _pass_again(self, passed: _Pass, look: Callable[[Probe], None]) -> str:
        """Call `look` with a probe of the model. Return the error that the model raises, or ""."""
        self._is_probing = True
        try:
            with token_probe.undisturbed(self._model, self._generators) as start:
                look(
                    Probe(
                        model=self._model,
                        arguments=passed.arguments,
                        start=start,
                        autocast=passed.autocast,
                        autocast_dtype=passed.autocast_dtype,
                        ranks=self._subject.world_size,
                        parity=self._parity(),
                        special=_special(self._model),
                    )
                )
        except Exception as error:  # noqa: BLE001  (the script's code, in a pass that it never makes)
            return f"it can't be passed tokens again ({type(error).__name__}: {error})"
        finally:
            self._is_probing = False
        return ""

    def _parity(self) -> int:
        layout = self._subject.layout
        return self._rank % 2 if layout is None else layout.parity(self._rank)

    def _rows(self, passed: _Pass) -> Rows | None:
        if self._table is None:
            return None
        return tokens.rows_of(passed.arguments, self._table.place, self._table.padding_id)


def of(
    subject: Subject,
    generators: Generators,
    write: Callable[[Sequence[trace.Event]], object],
    were_recomputed: Callable[[], bool],
) -> Language:
    """Return an object that examines a rank's micro-batches if a contract requires it.

    Otherwise return one that ignores them.
    """
    if TOKENS not in os.environ:
        return Language()
    looking = Looking(subject, generators, write, were_recomputed)
    looking.listen()
    return looking


def _interest(rows: Rows) -> tuple[bool, bool]:
    return rows.documents is not None, rows.is_masked


# --- facts from the model's configuration ---------------------------------------------------------


def _settings(model: nn.Module) -> dict[str, Any]:
    return dict(getattr(getattr(model, "config", None), "__dict__", {}))


def _special(model: nn.Module) -> set[int]:
    named = [v for n, v in _settings(model).items() if n.endswith(("_token_id", "_token_index"))]
    flat = [one for value in named for one in (value if isinstance(value, list) else [value])]
    return {one for one in flat if type(one) is int}


def _beginnings(model: nn.Module, rows: Rows) -> tuple[int | None, int | None]:
    """Return how many documents begin with a BOS token, and how many with two BOS tokens.

    Both numbers are None if the model's configuration has no BOS token, or one that also ends
    texts.
    """
    settings = _settings(model)
    begin, ends = settings.get(_BEGIN), [settings.get(name) for name in _END]
    ends = [one for value in ends for one in (value if isinstance(value, list) else [value])]
    if type(begin) is not int or begin in ends:
        return None, None
    once = rows.begins() & (rows.ids == begin)
    inside = ~rows.begins() & ~rows.padding & (rows.ids == begin)
    twice = once[:, :-1] & inside[:, 1:]
    return int(once.sum()), int(twice.sum())


def _tied(model: nn.Module) -> bool | None:
    """Return whether the input and output embeddings are equal, if the configuration ties them.

    None if it doesn't tie them, or if they can't be compared.
    """
    if _settings(model).get("tie_word_embeddings") is not True:
        return None
    layers = [
        getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")
    ]
    tables = [getattr(layer, "weight", None) for layer in layers]
    weights = [tensors.local(table) for table in tables if isinstance(table, Tensor)]
    if len(weights) < 2 or weights[0].shape != weights[1].shape:
        return None
    return bool(torch.equal(weights[0].detach(), weights[1].detach()))
