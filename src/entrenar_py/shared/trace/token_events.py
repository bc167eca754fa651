"""Events of a script with a language model: the tokens that a loss counts, and probes of the model.

To probe its model, a rank passes micro-batches through it again with some tokens replaced, and
records how much the outputs change. The judge decides what the changes mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """Worker `rank` passed `rows` x `positions` token ids to its model in a micro-batch of `step`.

    - `padding`: the number of padding tokens, by a mask or by the embedding's `padding_idx`.
    - `documents`: the number of documents in rows with several (packed) documents; `shown` is the
      argument of the model that shows where they begin.
    - `begun`: the number of documents (or rows) that begin with the model's BOS token; None if the
      token is unknown.
    - `doubled`: the number of documents (or rows) that begin with two BOS tokens; None if the token
      is unknown.
    - `tied`: whether the input embedding and the output layer have equal values; None if the model
      doesn't declare them tied.
    - `recomputed`: whether modules were called within the step's backward passes (activation
      checkpointing).
    - `problem`: the reason why the model was not probed; "" if it was.
    """

    step: int
    rank: int
    micro_batch: int
    rows: int
    positions: int
    padding: int = 0
    documents: int = 0
    shown: str = ""
    begun: int | None = None
    doubled: int | None = None
    tied: bool | None = None
    recomputed: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Event):
    """Worker `rank` computed a cross-entropy over its tokens in a micro-batch of `step`.

    - `call`: the index of the loss within the micro-batch.
    - `counted`: the number of targets that are not ignored.
    - `least`, `most`: the range of the factors with which the counted targets' losses enter the
      value on which `backward` was called; `dtype` is the dtype of the factors.
    - `known`: the number of counted targets for which three input tokens are known: the token at
      the target's position, the next one and the one after that.
    - `matches`: for each of these three tokens, the number of targets that equal it.
    - `padded`: the number of counted targets at the position of a padding token.
    - `crossing`: the number of counted targets that are the first token of the next document.
    - `tokens_crossing`: the number of distinct tokens among the `crossing` targets.
    """

    step: int
    rank: int
    micro_batch: int
    call: int
    counted: int
    least: float
    most: float
    dtype: str
    known: int = 0
    matches: tuple[int, ...] = ()
    padded: int = 0
    crossing: int = 0
    tokens_crossing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reread(Event):
    """Worker `rank` passed a micro-batch of `step` through its model again, some tokens replaced.

    - `replaced`: which tokens were replaced: `later` (all from position `cut` on), `padding`, or
      `earlier` (all documents but the last in each row).
    - `still`: the largest change of an output that must not change, at `position` of `row`.
    - `moved`: the largest change of the other outputs.
    - `own`: the largest change of the outputs at the first replaced position.
    - `loss`: the change of the loss that the model returned; None if it returned no loss.
    - `noise`: the largest change of an output in a row without replaced tokens.
    - `scale`: the largest absolute output.
    - `unit`: the rounding unit of the dtype of the computation.
    """

    step: int
    rank: int
    micro_batch: int
    replaced: str
    still: float
    moved: float
    noise: float
    scale: float
    unit: float
    cut: int | None = None
    own: float | None = None
    loss: float | None = None
    row: int | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """Worker `rank` computed a cross-entropy without gradient before it took `step`.

    `counted` is the number of targets. `training` says whether the model was in training mode, and
    `drew` whether its forward pass drew random numbers.
    """

    step: int
    rank: int
    counted: int
    training: bool
    drew: bool
