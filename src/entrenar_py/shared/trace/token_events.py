"""The events of a script with a model of token ids: what each loss is over, what depends on what.

A rank with a probed model passes micro-batches through it again, with other tokens. It records
how much the outputs change, and leaves it to the judge what that means.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """Worker `rank` gave its model token ids, `rows` x `positions`, in a micro-batch of `step`.

    `padding` counts those that a mask or the embedding's `padding_idx` shows as padding.
    `documents` counts the documents that lie in rows with several: by `shown`, the argument that
    shows them. `begun` counts the documents (or rows) that begin with the model's token for that,
    and `doubled` those that begin with it twice; both are None if no such token is known. `tied`
    tells whether the tables of the first and the last layer have the same values; None if the model
    doesn't say that they have. `recomputed` tells whether modules were called within the step's
    backward passes. `problem` says why the model was not probed, "" if it was.
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
    """Worker `rank` took a cross-entropy over its tokens in a micro-batch of `step`.

    `call` counts the losses of the micro-batch. `counted` of its targets are not ignored. A counted
    token's loss has the share `least` to `most` in what the backward pass began at; `dtype` is the
    format of these numbers. Of `known` counted targets the token at that place of the row, the next
    one and the one after that are known, and `matches` says how many targets equal each.

    Of the counted targets `padded` are padding, at the place of a padding token; `crossing` are the
    first token of another document, and `tokens_crossing` is how many different tokens these are.
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
    """Worker `rank` passed a micro-batch of `step` through its model again, with other tokens.

    `replaced` says which: `later` (all from position `cut` on), `padding`, or `earlier` documents
    (all but the last in each row). `still` is the largest change of an output that must stay, at
    `position` of `row`; `moved` that of the other outputs, and `own` that of the outputs at the
    first replaced position. `loss` is the change of the loss that the model returned, None if it
    returned none. `noise` is the largest change of a row that keeps its tokens, `scale` the largest
    output, and `unit` the rounding of the format that was computed in.
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
    """Worker `rank` took a cross-entropy of `counted` targets without gradient, before it made
    `step`.

    `training` tells whether the model was in training mode, and `drew` whether its pass drew random
    numbers.
    """

    step: int
    rank: int
    counted: int
    training: bool
    drew: bool
