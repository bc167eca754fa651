"""A small decoder, trained on tokens and probed in the same way as a script's model.

Its ranks take turns in one process. Option `rows` selects whole rows (`plain`), rows with padding
on the left (`padded`), or rows with two documents (`packed`). With dropout, the block is computed
again in the backward pass, and the model is evaluated after the first step. Letters in shape
comments: n rows, t positions, d = WIDTH, h heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from entrenar_py.check.observing import tokens
from entrenar_py.check.observing.generators import Generators
from entrenar_py.check.observing.language import Looking
from entrenar_py.check.observing.random_numbers import RandomNumbers
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.recorder import Recorder

PAD, BEGIN, END, VOCABULARY, WIDTH, HEADS, LENGTH = 0, 1, 2, 23, 16, 2, 12
NUM_ROWS, IGNORED, EVALUATED_AFTER = 3, -100, 0
KINDS = ("plain", "padded", "packed")


class Batch(NamedTuple):
    """Token ids [n, t]; a mask, 0 for padding and otherwise 1; and positions in a document."""

    ids: Tensor
    mask: Tensor
    positions: Tensor


# --- the data -------------------------------------------------------------------------------------


def document(length: int, generator: torch.Generator) -> Tensor:
    """Return `length` tokens: BOS, then random ones."""
    tokens = torch.randint(END + 1, VOCABULARY, (length - 1,), generator=generator)
    return torch.cat([torch.tensor([BEGIN]), tokens])


def batch(kind: str, number: int, generator: torch.Generator) -> Batch:
    """Return micro-batch `number`. Padded micro-batches differ in their number of tokens."""
    rows, masks, positions = [], [], []
    for row in range(NUM_ROWS):
        lengths = [LENGTH]
        if kind == "packed":
            lengths = [4 + row, LENGTH - 4 - row]
        elif kind == "padded":
            lengths = [LENGTH - (row + number) % 5]
        tokens = torch.cat([document(length, generator) for length in lengths])
        padding = LENGTH - len(tokens)
        rows.append(F.pad(tokens, (padding, 0), value=PAD))
        masks.append(F.pad(torch.ones_like(tokens), (padding, 0)))
        counted = torch.cat([torch.arange(length) for length in lengths])
        positions.append(F.pad(counted, (padding, 0)))
    return Batch(*map(torch.stack, (rows, masks, positions)))


def targets_of(batch: Batch) -> Tensor:
    """Return each token's next token, [n, t]; ignored for padding and at a document's end."""
    after = F.pad(batch.ids[:, 1:], (0, 1), value=IGNORED)
    begins = F.pad(batch.positions[:, 1:] == 0, (0, 1), value=True)
    return after.masked_fill(begins | (batch.mask == 0), IGNORED)


# --- the model ------------------------------------------------------------------------------------


def sees(mask: Tensor, positions: Tensor) -> Tensor:
    """Return the attention mask, bool [n, t, t]: each token sees its document up to itself."""
    length = mask.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    documents = ((positions == 0) & (mask > 0)).long().cumsum(1)
    same = documents[:, :, None] == documents[:, None, :]
    known = (mask > 0)[:, None, :] | torch.eye(length, dtype=torch.bool)
    return earlier & same & known


def mixed(normed: Tensor) -> Tensor:
    """Return the input of the feed-forward layers, [n, t, d] -> [n, t, d]."""
    return normed


class Decoder(nn.Module):
    """A block of attention and feed-forward layers; the embedding is also the output layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD, tie_word_embeddings=True
        )
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.dropout = nn.Dropout(dropout)
        tie(self)

    def get_input_embeddings(self) -> nn.Module:
        """Return the first layer."""
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the last layer."""
        return self.head

    def forward(self, ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Return the logits: token ids [n, t] -> [n, t, VOCABULARY]."""
        x = self.tokens(ids) + self.places(position_ids)
        seen = sees(attention_mask, position_ids)[:, None]
        if self.dropout.p and torch.is_grad_enabled():
            x = computed_again(self.block, x, seen)
        else:
            x = self.block(x, seen)
        scores: Tensor = self.head(self.norms[2](x))
        return scores

    def block(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return the block's output, [n, t, d] -> [n, t, d].

        `seen`, bool [n, 1, t, t], says which tokens each token sees.
        """
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)  # [n, t, h, e]
        q, k, v = (part.transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.dropout(self.out(heads.transpose(1, 2).flatten(2)))
        added: Tensor = self.narrow(F.gelu(self.wide(mixed(self.norms[1](x)))))
        return x + added


def tie(model: Decoder) -> None:
    """Make the embedding the output layer's weight."""
    model.head.weight = model.tokens.weight


def computed_again(block: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return the block's output; the backward pass computes its intermediate results again."""
    found: Tensor = checkpoint(block, *given, use_reentrant=False)
    return found


# --- the training ---------------------------------------------------------------------------------


def divisor(own: int, of_rank: int, of_all: int, scenario: Scenario) -> float:
    """Return the divisor of a micro-batch's summed loss, for the mean over all ranks.

    `own`, `of_rank` and `of_all` are numbers of counted targets: of the micro-batch, of the rank's
    step, and of all ranks.
    """
    return of_all / scenario.world_size


def run(scenario: Scenario) -> trace.Trace:
    """Train for some steps; record the losses of all micro-batches and the probes of two.

    Raises UsageError for an unknown value of option `rows`.
    """
    kind = scenario.options.get("rows", "plain")
    if kind not in KINDS:
        raise UsageError.of("rows", kind, f"allowed are {', '.join(KINDS)}")
    recorder = Recorder(scenario)
    with torch.random.fork_rng():
        torch.manual_seed(scenario.seed)
        model = Decoder(scenario.dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        looking = [_Rank(model, optimizer, rank, recorder) for rank in _ranks(scenario)]
        for step in range(scenario.num_steps):
            _step(model, looking, kind, step, scenario)
            optimizer.step()
            optimizer.zero_grad()
            for one in looking:
                one.looking.stepped(step)
            if scenario.dropout and step == EVALUATED_AFTER:
                evaluate(model, looking, batch(kind, 0, torch.Generator().manual_seed(0)))
    return recorder.finish(status="completed")


def _ranks(scenario: Scenario) -> range:
    return range(scenario.world_size)


class _Rank:
    """A rank's record of the model, which all ranks share."""

    def __init__(
        self, model: Decoder, optimizer: torch.optim.Optimizer, rank: int, recorder: Recorder
    ) -> None:
        self.rank, self._model, self._recorder = rank, model, recorder
        self.place = 0, 0
        size = recorder.plan.world_size
        subject = Subject(model, (optimizer,), declared=None, rank=rank, world_size=size)
        drawing = Generators(model, objects={})
        self.random = RandomNumbers(
            drawing,
            rank,
            lambda: self.place,
            self._write,
            compiles=lambda: False,  # earlier training runs in this process may have changed it
        )
        self.looking = Looking(subject, drawing, self._write, self.random.were_recomputed)

    def trained(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch; record the model's mode and its draws."""
        step, number = self.place
        self.random.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.random.end_backward()
        shard = trace.Shard(
            step=step,
            epoch=0,
            rank=self.rank,
            shard=self.rank * self._recorder.plan.accumulation + number,
            ids=(),
            loss_sum=None,
            weight=0.0,
            finite=True,
            evaluating=not self._model.training,
        )
        self._write([shard])

    def _write(self, events: Iterable[trace.Event]) -> None:
        for event in events:
            self._recorder.emit(event)


def evaluate(model: Decoder, looking: Sequence[_Rank], batch: Batch) -> None:
    """Compute the loss of held-out rows on each rank."""
    model.eval()
    for rank in looking:
        loss_of(model, rank, batch)
    model.train()


@torch.no_grad()
def loss_of(model: Decoder, rank: _Rank, batch: Batch) -> Tensor:
    """Return the loss of held-out rows."""
    rank.looking.aside(model)
    leave = tokens.listen(rank.looking.scored)
    loss = F.cross_entropy(model(*batch).flatten(0, 1), targets_of(batch).flatten())
    leave()
    return loss


def _step(
    model: Decoder, looking: Sequence[_Rank], kind: str, step: int, scenario: Scenario
) -> None:
    """Add the gradients of a step's micro-batches, of all ranks."""
    generator = torch.Generator().manual_seed(1 + step + 100 * scenario.seed)
    numbers = range(scenario.accumulation)
    batches = {
        (rank, number): batch(kind, number + 2 * rank, generator)
        for rank in _ranks(scenario)
        for number in numbers
    }
    targets = {place: targets_of(watched) for place, watched in batches.items()}
    counts = {place: int((watched != IGNORED).sum()) for place, watched in targets.items()}
    for (rank, number), rows in batches.items():
        watched = looking[rank]
        watched.place = step, number
        watched.random.mark(None)
        watched.looking.forward(model, (rows, {}), number)
        leave = tokens.listen(watched.looking.scored)
        wanted = targets[rank, number].flatten()
        summed = F.cross_entropy(model(*rows).flatten(0, 1), wanted, reduction="sum")
        leave()
        watched.random.mark("forward")
        of_rank, of_all = sum(counts[rank, number] for number in numbers), sum(counts.values())
        loss = summed / divisor(counts[rank, number], of_rank, of_all, scenario)
        watched.trained(loss / scenario.world_size)
