"""Events of fine-tuning: what a checkpoint and rows became, and what was made of them."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Event):
    """Sample `sample` as the trainer has it, and what stock `transformers` makes of its row.

    `row` is the number of the row in its file. `tokens` and `stock_tokens` are those of the trainer
    and of the stock tokenizer. `predicted` are the positions of tokens that the trainer predicts,
    `completion` of those that should be: after the first in plain text, in the assistant's turns in
    a chat, none in a classifier. `label` is the number of the class, -1 without classes.
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

    Seen at the derivatives of the loss by these states, which are not zero there. A language
    model predicts the token at p + 1 from the state at p, a classifier the class from the last one.
    """

    sample: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed(Event):
    """The classes' weights in the loss: of the kind `asked` for, by the classes' numbers."""

    asked: str
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(Event):
    """Weights that aren't trained, under their names in the checkpoint, as they were `when`.

    The first such event of a run has those of the checkpoint's own files.
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
    """The matrices of an adapted layer, float32 with values: as they were `when`.

    `tensors` has the adapter's `a` [rank, in] and `b` [out, rank], `base` [out, in], the
    checkpoint's weight, and `merged` [out, in], the weight in the merged model; all before the
    training without `merged` if `when` is "start". `shape` is (out, in). `rank` and `alpha` are
    those that the run was asked for.
    """

    when: str
    layer: str
    rank: int
    alpha: float
    shape: tuple[int, ...]
    tensors: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised(Event):
    """The weight of a linear layer as a fine-tuning holds it in NF4, and as stock libraries do.

    `due` is true within blocks; heads stay as they are. `held` and `stock` have the codes, scales
    and levels that the trainer and `bitsandbytes` make of the checkpoint's weight. `held` is empty
    if the trainer has it in another format.
    """

    layer: str
    due: bool
    held: Tensors
    stock: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRow(Event):
    """A row of a teacher's shard `shard`, and the same by stock `transformers` in float64.

    `tokens` and `log_probabilities` are what the row has at `position` of `sample`, and `rest` the
    mass of all other tokens. `stock` has the log-probability of each token of the vocabulary there.
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

    `complete` is what the stage said of itself. `due` is the number of shards that there are to be.
    """

    when: str
    digests: tuple[str, ...]
    complete: bool
    due: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway(Event):
    """A student was given shards that are not its own: `what` is wrong with them.

    `refused` is the message, None if it took them.
    """

    what: str
    refused: str | None
