"""Events of a script with a model of token ids: the scope of each loss, and what outputs depend on.

A rank with a probed model passes micro-batches through it again, with different tokens. It records
how much the outputs change; the judge decides what that means.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """Worker `rank` gave its model token ids, `rows` x `positions`, in a micro-batch of `step`.

    - `padding`: the number of tokens that a mask or the embedding's `padding_idx` shows as padding.
    - `documents`: the number of documents in rows that hold several; `shown` is the argument that
      shows them.
    - `begun`: the number of documents (or rows) that begin with the model's BOS token, None if
      that token is unknown.
    - `doubled`: the number of those that begin with it twice, None if it is unknown.
    - `tied`: whether the embeddings of the first and the last layer have the same values; None if
      the model doesn't declare them tied.
    - `recomputed`: whether modules were called within the step's backward passes.
    - `problem`: the reason why the model was not probed, "" if it was.
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
    - `counted`: the number of its targets that are not ignored.
    - `least`, `most`: the range of the factors of the counted tokens' losses in the value at which
      the backward pass began; `dtype` is the dtype of these numbers.
    - `known`: the number of counted targets with three known tokens: the token at the target's
      place in the row, the next one and the one after that.
    - `matches`: for each of these three, how many targets equal it.
    - `padded`: the number of counted targets at the place of a padding token.
    - `crossing`: the number of counted targets that are the first token of the next document.
    - `tokens_crossing`: the number of different tokens among these.
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
    """Worker `rank` passed a micro-batch of `step` through its model again, with different tokens.

    - `replaced`: `later` (all tokens from position `cut` on), `padding`, or `earlier` documents
      (all but the last in each row).
    - `still`: the largest change of an output that must not change, at `position` of `row`.
    - `moved`: the largest change of the other outputs.
    - `own`: the largest change of the outputs at the first replaced position.
    - `loss`: the change of the loss that the model returned, None if it returned none.
    - `noise`: the largest change of a row that keeps its tokens.
    - `scale`: the largest output.
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

    `counted` is the number of its targets. `training` tells whether the model was in training mode,
    and `drew` whether its pass drew random numbers.
    """

    step: int
    rank: int
    counted: int
    training: bool
    drew: bool
