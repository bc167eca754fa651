"""Events of fine-tuning: the trainer's view of a checkpoint and its rows, and the results."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Event):
    """Sample `sample` in the trainer, and what stock `transformers` makes of its row.

    - `row`: the number of the row in its file.
    - `tokens`, `stock_tokens`: the tokens from the trainer and from the stock tokenizer.
    - `predicted`: the positions of the tokens that the trainer predicts.
    - `completion`: the positions of the tokens that it should predict: all but the first in plain
      text, the assistant's turns in a chat, none in a classifier.
    - `label`: the number of the class, -1 without classes.
    """

    sample: int
    row: int
    tokens: tuple[int, ...]
    predicted: tuple[int, ...]
    stock_tokens: tuple[int, ...]
    completion: tuple[int, ...]
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught(Event):
    """The loss of sample `sample` depended on the model's last hidden states at `positions`.

    The derivatives of the loss with respect to these states are not zero there. A language model
    predicts the token at p + 1 from the state at p, a classifier the class from the last state.
    """

    sample: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed(Event):
    """The weights of the classes in the loss, by class number; `asked` is their requested kind."""

    asked: str
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(Event):
    """Weights that aren't trained, under their names in the checkpoint, as they were `when`.

    The first such event of a run has the weights in the checkpoint's own files.
    """

    when: str
    weights: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack(Event):
    """The trained tensors as stock library `by` loads them, under the trainer's names."""

    by: str
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted(Event):
    """The matrices of an adapted layer, float32 with values, as they were `when`.

    - `rank`, `alpha`: the values that the run requested.
    - `shape`: (out, in).
    - `tensors`: the adapter's `a` [rank, in] and `b` [out, rank]; `base` [out, in], the weight in
      the checkpoint; `merged` [out, in], the weight in the merged model. If `when` is "start", they
      are those before training, without `merged`.
    """

    when: str
    layer: str
    rank: int
    alpha: float
    shape: tuple[int, ...]
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised(Event):
    """The weight of a linear layer in NF4, as held in fine-tuning and as made by stock libraries.

    `due` is true within blocks; heads are not quantised. `held` and `stock` have the codes, scales
    and levels that the trainer and `bitsandbytes` compute from the checkpoint's weight. `held` is
    empty if the trainer has a different format.
    """

    layer: str
    due: bool
    held: Tensors
    stock: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRow(Event):
    """A row of a teacher's shard `shard`, and the same row from stock `transformers` in float64.

    `tokens` and `log_probabilities` are those of the row at `position` of `sample`; `rest` is the
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
    """The shards of a teacher as they were `when`: the digest of each file that is listed.

    `complete` is the stage's own claim. `due` is the planned number of shards.
    """

    when: str
    digests: tuple[str, ...]
    complete: bool
    due: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway(Event):
    """A student was given shards that are not its own; `what` is wrong with them.

    `refused` is the message, or None if the student accepted them, and `error_kind` is the `kind`
    of that error. "" stands for an error without a kind; earlier builds recorded no kind (None).
    """

    what: str
    refused: str | None
    error_kind: str | None = None
