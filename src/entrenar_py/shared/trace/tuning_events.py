"""Events of fine-tuning: what the trainer makes of a checkpoint and its rows, and the results."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Event):
    """Sample `sample` as the trainer encodes it, and its row as stock `transformers` encodes it.

    - `row`: the number of the row in its file.
    - `tokens`, `stock_tokens`: the token ids from the trainer and from the stock tokenizer.
    - `predicted`: the positions of the tokens that the trainer predicts.
    - `completion`: the positions of the tokens that the trainer should predict: all but the first
      in plain text, the assistant's turns in a chat, none for a classifier.
    - `label`: the number of the class, -1 without classes.
    - `side`: for a preference pair, the side that the event is about: "chosen" or "rejected".
    """

    sample: int
    row: int
    tokens: tuple[int, ...]
    predicted: tuple[int, ...]
    stock_tokens: tuple[int, ...]
    completion: tuple[int, ...]
    label: int
    side: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught(Event):
    """The loss of sample `sample` depended on the model's last hidden states at `positions`.

    These are the positions at which the derivative of the loss with respect to the state is not
    zero. A language model predicts the token at p + 1 from the state at p; a classifier predicts
    the class from the last state. `side` is as in `Encoded`.
    """

    sample: int
    positions: tuple[int, ...]
    side: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Referred(Event):
    """The reference model's log-probabilities of both sides of pair `sample`, at use number `use`.

    `use` counts from 0. Preference optimisation compares the trained model with the reference
    model.
    """

    sample: int
    use: int
    chosen: float
    rejected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed(Event):
    """The weights of the classes in the loss, by class number.

    `asked` is the requested weighting.
    """

    asked: str
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(Event):
    """Weights that aren't trained, under their names in the checkpoint, at the time `when`.

    The first such event of a run has the weights from the checkpoint's files.
    """

    when: str
    weights: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack(Event):
    """The trained tensors as the stock library `by` loads them, under the trainer's names."""

    by: str
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(Event):
    """The matrices of a layer with an adapter, float32 with values, at the time `when`.

    - `rank`, `alpha`: the values that the run requested.
    - `shape`: (out, in).
    - `tensors`: the adapter's `a` [rank, in] and `b` [out, rank]; `base` [out, in], the weight in
      the checkpoint; `merged` [out, in], the weight in the merged model. If `when` is "start", the
      values are from before training, and `merged` is missing.
    """

    when: str
    layer: str
    rank: int
    alpha: float
    shape: tuple[int, ...]
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised(Event):
    """The weight of a linear layer in NF4: as fine-tuning holds it, and as stock libraries make it.

    `due` is true within blocks, since heads are not quantised. `held` and `stock` have the codes,
    scales and levels that the trainer and `bitsandbytes` compute from the checkpoint's weight.
    `held` is empty if the trainer has a different format.
    """

    layer: str
    due: bool
    held: Tensors
    stock: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRow(Event):
    """A row of a teacher's shard `shard`, and its counterpart from stock `transformers` in float64.

    `tokens` and `log_probabilities` are those stored for `position` of `sample`; `rest` is the
    probability of all other tokens. `stock` has the log-probability of each token of the vocabulary
    at that position.
    """

    shard: int
    sample: int
    position: int
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    rest: float
    stock: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(Event):
    """The shards of a teacher at the time `when`: the digest of each listed file.

    `complete` says whether the stage claims to be complete. `due` is the planned number of shards.
    """

    when: str
    digests: tuple[str, ...]
    complete: bool
    due: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway(Event):
    """A student was given damaged or foreign shards; `what` says what is wrong with them.

    `refused` is the error message, None if the student accepted the shards. `error_kind` is the
    `kind` of the error, "" for an error without a kind, None in traces of earlier builds.
    """

    what: str
    refused: str | None
    error_kind: str | None = None
