"""Records samples beside those made without our code, and which tokens the loss counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from entrenar_py.shared import trace
from entrenar_py.systems.finetuned import small
from entrenar_py.systems.finetuned.small import Made
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, Tensors
from entrenar_py.train.model import objectives
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.workload import Finetuning


class _Part(NamedTuple):
    """The part of a batch that is a sample's: its first token is at `begin` of the columns."""

    sample: int
    row: int
    columns: slice
    begin: int


class Watched(Finetuning):
    """Notes for each sample at which positions the loss depends on the last hidden state.

    `taught` holds them by sample, from all steps together.
    """

    def __init__(self, module: nn.Module, samples: Samples, **named: Any) -> None:
        super().__init__(module, samples, **named)
        self.taught: dict[int, set[int]] = defaultdict(set)
        self._parts_now: list[_Part] = []  # of this batch
        model: Any = module
        if hasattr(model, "peft_config"):
            model = model.get_base_model()
        model.base_model.register_forward_hook(self._watch)

    def gradients(
        self, tensors: Tensors, ids: Sequence[int], *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        """See `Workload.gradients`."""
        self._parts_now = self._parts(ids)
        return super().gradients(tensors, ids, drop=drop, scale=scale)

    def _watch(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        hidden = output[0]
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._note, self._parts_now))  # type: ignore[no-untyped-call]

    def _parts(self, ids: Sequence[int]) -> list[_Part]:
        """Return where each sample is. If it has a row, that is its part, padding included."""
        if self.packed_tokens is None:
            first = self._rows.batch(ids)[1].argmax(1).tolist()
            places = enumerate(zip(ids, first, strict=True))
            return [_Part(sample, row, slice(None), begin) for row, (sample, begin) in places]
        found, lengths = list[_Part](), [self._samples.length(i) for i in ids]
        for row, members in enumerate(objectives.rows_of(lengths, self.packed_tokens)):
            begin = 0
            for member in members:
                end = begin + lengths[member]
                found.append(_Part(ids[member], row, slice(begin, end), 0))
                begin = end
        return found

    def _note(self, parts: Sequence[_Part], gradient: Tensor) -> None:
        """Note the positions of a gradient, [n, t, width], that is not zero."""
        counts = (gradient != 0).any(-1)
        for part in parts:
            positions = counts[part.row, part.columns].nonzero().flatten() - part.begin
            self.taught[part.sample].update(positions.tolist())


def events(made: Made, prepared: Prepared, workload: Watched) -> Iterator[trace.Event]:
    """Yield Encoded and Taught events of all samples, and for classes a Weighed event."""
    stock = list(stock_rows(made))
    row_of = rows_of(prepared.train, len(made.rows))
    for sample in range(len(prepared.train)):
        part = prepared.train.part(sample)
        stock_tokens, completion = stock[row_of[sample]]
        yield trace.Encoded(
            sample=sample,
            row=row_of[sample],
            tokens=tuple(prepared.train.tokens[part].tolist()),
            predicted=tuple(prepared.train.is_target[part].nonzero()[0].tolist()),
            stock_tokens=stock_tokens,
            completion=completion,
            label=int(prepared.train.labels[sample]),
        )
    for sample, positions in sorted(workload.taught.items()):
        yield trace.Taught(sample=sample, positions=tuple(sorted(positions)))
    if made.settings.task == "classify":
        asked = made.settings.classes.weights
        yield trace.Weighed(asked=asked, weights=prepared.class_weights)


def rows_of(samples: Samples, num_rows: int) -> list[int]:
    """Return the row of each sample: its own number, or for a copy the row with its tokens."""
    numbers = {samples.tokens[samples.part(row)].tobytes(): row for row in range(num_rows)}
    copies = range(num_rows, len(samples))
    return [
        *range(min(num_rows, len(samples))),
        *(numbers.get(samples.tokens[samples.part(copy)].tobytes(), 0) for copy in copies),
    ]


def stock_rows(made: Made) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the tokens of each row as `transformers` makes them, and the positions to predict."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.settings.model, local_files_only=True)
    for row in made.rows:
        yield _stock(tokenizer, made.settings.task, row)


def _stock(
    tokenizer: Any, task: str, row: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if task == "instruct":
        return _chat(tokenizer, row["messages"])
    tokens = list(tokenizer(row["text"])["input_ids"])
    if task == "classify":
        return tuple(tokens), ()
    tokens.append(tokenizer.eos_token_id)
    return tuple(tokens), tuple(range(1, len(tokens)))


def _chat(
    tokenizer: Any, messages: Sequence[Mapping[str, str]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of a chat, and the positions of those that end in what the assistant says.

    The chat is written without its template, and tokens are put to bytes by their names: neither
    marks nor offsets of `transformers` have a part in it.
    """
    text, is_learned = small.BEGIN, [False] * len(small.BEGIN)
    for message in messages:
        head = f"{small.TURN}{message['role']}\n"
        said = f"{message['content']}{small.END}\n"
        text += head + said
        learned = message["role"] == "assistant"
        is_learned += [False] * len(head.encode()) + [learned] * len(said.encode())
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    encoded, table, num_bytes, completion = text.encode(), byte_of_character(), 0, list[int]()
    for place, name in enumerate(tokenizer.convert_ids_to_tokens(tokens)):
        own = name.encode() if name in small.SPECIAL else bytes(table[sign] for sign in name)
        assert encoded[num_bytes : num_bytes + len(own)] == own
        num_bytes += len(own)
        if is_learned[num_bytes - 1]:
            completion.append(place)
    return tuple(tokens), tuple(completion)


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character in a byte-level token's name, as GPT-2 has them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
