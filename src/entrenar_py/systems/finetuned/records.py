"""Records of a fine-tuning run: untrained weights, weights in NF4, and samples."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from entrenar_py.shared import trace
from entrenar_py.systems.finetuned import small_run
from entrenar_py.systems.finetuned.small_run import Fixture
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, Tensors
from entrenar_py.train.model import objectives
from entrenar_py.train.model.preference import SIDES, DirectPreference
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.workload import Finetuning


def weights_of(folder: Path) -> dict[str, Array]:
    """Return all weights in the safetensors files of a folder, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def of_files(folder: Path) -> trace.Frozen:
    """Return the record of all weights in the safetensors files of a checkpoint."""
    records = {name: trace.record_tensor(array) for name, array in weights_of(folder).items()}
    return trace.Frozen(when="in the checkpoint", weights=records)


def of_module(module: nn.Module, when: str) -> trace.Frozen:
    """Return the record of the current values of the parameters of `module` that aren't trained.

    A parameter in NF4 has bytes as values, unlike the checkpoint's weight, so it gets another name.
    """
    records = {
        name_in_checkpoint(name)
        + (" in NF4" if parameter.dtype == torch.uint8 else ""): trace.record_tensor(
            np.ascontiguousarray(parameter.detach().cpu().numpy())
        )
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
    return trace.Frozen(when=when, weights=records)


def name_in_checkpoint(name: str) -> str:
    """Return the checkpoint's name for a parameter of a model with adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


_WITHIN_BLOCKS = re.compile(r"\.layers\.\d+\..*_proj\.weight$")  # layers of qwen3 and llama
_HEADS = ("lm_head.weight",)


def is_within_blocks(name: str) -> bool:
    """Return whether a weight of the checkpoint belongs to a linear layer within a block."""
    return bool(_WITHIN_BLOCKS.search(name))


def decoded(fixture: Fixture) -> dict[str, Array]:
    """Return the checkpoint's weights; weights within blocks are quantised to NF4 and decoded."""
    weights = weights_of(fixture.settings.model)
    for name, array in weights.items():
        if is_within_blocks(name):
            codes, state = _quantised(array)
            weights[name] = np.ascontiguousarray(_functional().dequantize_4bit(codes, state))
    return weights


def nf4_events(fixture: Fixture, module: nn.Module) -> Iterator[trace.Quantised]:
    """Yield the weight of each linear layer, as `module` has it, and in NF4 by `bitsandbytes`."""
    layers = {name_in_checkpoint(name): layer for name, layer in _linear(module)}
    for name, array in weights_of(fixture.settings.model).items():
        if not (is_within_blocks(name) or name in _HEADS):
            continue
        weight = layers[name].weight
        is_nf4 = getattr(weight, "quant_state", None) is not None
        yield trace.Quantised(
            layer=name.removesuffix(".weight"),
            due=is_within_blocks(name),
            held=_records(weight.data, weight.quant_state) if is_nf4 else {},
            stock=_records(*_quantised(array)),
        )


def _linear(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and ".lora_" not in name:
            yield f"{name}.weight", layer


def _quantised(array: Array) -> tuple[Tensor, Any]:
    codes, state = _functional().quantize_4bit(
        torch.from_numpy(array), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return codes, state


def _records(codes: Tensor, state: Any) -> trace.Tensors:
    """Return records of the codes, the scales' codes, their scales and mean, and both levels."""
    parts = {
        "codes": codes,
        "levels": state.code,
        "scales": state.absmax,
        **({"mean": state.offset, "second scales": state.state2.absmax} if state.nested else {}),
    }
    return {
        name: trace.record_tensor(np.ascontiguousarray(part.detach().cpu().numpy()))
        for name, part in parts.items()
    }


def _functional() -> Any:
    from bitsandbytes import functional

    return functional


_SIDES = ("chosen", "rejected")


class _Part(NamedTuple):
    """The part of a batch that belongs to a sample: its first token is in column `begin`."""

    sample: int
    row: int
    columns: slice
    begin: int


class Watched(Finetuning):
    """Records, for each sample, the positions at which the loss depends on the last hidden state.

    `taught` has the positions by sample, from all steps together.
    """

    def __init__(self, module: nn.Module, samples: Samples, **named: Any) -> None:
        super().__init__(module, samples, **named)
        self.taught: dict[int, set[int]] = defaultdict(set)
        self._parts_now: list[_Part] = []  # parts of this batch
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
        """Return the part of each sample.

        A sample with its own row has the whole row, with padding.
        """
        if self.packed_tokens is None:
            first = self._rows.batch(ids)[1].argmax(1).tolist()
            places = enumerate(zip(ids, first, strict=True))
            return [_Part(sample, row, slice(None), begin) for row, (sample, begin) in places]
        parts, lengths = list[_Part](), [self._samples.length(i) for i in ids]
        for row, members in enumerate(objectives.rows_of(lengths, self.packed_tokens)):
            begin = 0
            for member in members:
                end = begin + lengths[member]
                parts.append(_Part(ids[member], row, slice(begin, end), 0))
                begin = end
        return parts

    def _note(self, parts: Sequence[_Part], gradient: Tensor) -> None:
        """Note the positions at which `gradient`, [n, t, width], is not zero."""
        counts = (gradient != 0).any(-1)
        for part in parts:
            positions = counts[part.row, part.columns].nonzero().flatten() - part.begin
            self.taught[part.sample].update(positions.tolist())


class WatchedPairs(Watched, DirectPreference):
    """`Watched` for the rows of preference pairs, which also records the reference model's values.

    `taught` is by row instead of by sample. `referred` has the values of each pair, in order.
    """

    def __init__(self, module: nn.Module, samples: Samples, **named: Any) -> None:
        super().__init__(module, samples, **named)
        self.referred: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._ids_now: Sequence[int] = ()
        objective: Any = self.objective
        self._reference = objective.reference
        objective.reference = self._noted

    def _parts(self, ids: Sequence[int]) -> list[_Part]:
        self._ids_now = tuple(ids)
        rows = (SIDES * sample + side for sample in ids for side in range(SIDES))
        return [_Part(row, place, slice(None), 0) for place, row in enumerate(rows)]

    def _noted(self, *batch: Tensor) -> Tensor:
        values: Tensor = self._reference(*batch)
        for sample, (chosen, rejected) in zip(
            self._ids_now, values.view(-1, SIDES).tolist(), strict=True
        ):
            self.referred[sample].append((chosen, rejected))
        return values


def pair_events(
    fixture: Fixture, prepared: Prepared, workload: WatchedPairs
) -> Iterator[trace.Event]:
    """Yield Encoded and Taught events of both sides of all pairs, and Referred events."""
    stock, sides = list(stock_rows(fixture)), prepared.train.rows
    for row, (stock_tokens, completion) in enumerate(stock):
        part = sides.part(row)
        yield trace.Encoded(
            sample=row // SIDES,
            row=row // SIDES,
            tokens=tuple(sides.tokens[part].tolist()),
            predicted=tuple(sides.is_target[part].nonzero()[0].tolist()),
            stock_tokens=stock_tokens,
            completion=completion,
            label=-1,
            side=_SIDES[row % SIDES],
        )
    for row, positions in sorted(workload.taught.items()):
        learned = tuple(sorted(positions))
        yield trace.Taught(sample=row // SIDES, positions=learned, side=_SIDES[row % SIDES])
    for sample, values in sorted(workload.referred.items()):
        for use, (chosen, rejected) in enumerate(values):
            yield trace.Referred(sample=sample, use=use, chosen=chosen, rejected=rejected)


def sample_events(fixture: Fixture, prepared: Prepared, workload: Watched) -> Iterator[trace.Event]:
    """Yield Encoded and Taught events of all samples, and for classes a Weighed event."""
    stock = list(stock_rows(fixture))
    row_of = rows_of(prepared.train, len(fixture.rows))
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
    if fixture.settings.task == "classify":
        weighting = fixture.settings.classes.weights
        yield trace.Weighed(asked=weighting, weights=prepared.class_weights)


def rows_of(samples: Samples, num_rows: int) -> list[int]:
    """Return the row of each sample: its own number or, for a copy, the row with its tokens."""
    numbers = {samples.tokens[samples.part(row)].tobytes(): row for row in range(num_rows)}
    copies = range(num_rows, len(samples))
    return [
        *range(min(num_rows, len(samples))),
        *(numbers.get(samples.tokens[samples.part(copy)].tobytes(), 0) for copy in copies),
    ]


def stock_rows(fixture: Fixture) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the tokens of each row as `transformers` makes them, and the positions to predict.

    A pair yields two items: its chosen side, then its rejected side.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fixture.settings.model, local_files_only=True)
    for row in fixture.rows:
        if fixture.settings.task == "preference":
            for side in _SIDES:
                yield _stock_side(tokenizer, row["prompt"], row[side])
        else:
            yield _stock(tokenizer, fixture.settings.task, row)


def _stock_side(tokenizer: Any, prompt: Any, said: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of a side of a pair, and the positions of the tokens after its prompt."""
    if isinstance(prompt, list):
        return _chat(tokenizer, [*prompt, *said])
    before = tokenizer(prompt)["input_ids"]
    tokens = [*before, *tokenizer(f"{said}{small_run.END}", add_special_tokens=False)["input_ids"]]
    return tuple(tokens), tuple(range(len(before), len(tokens)))


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
    """Return the tokens of a chat, and the positions of tokens that end in the assistant's text.

    The chat is written without its template, and tokens are mapped to bytes by their names: neither
    masks nor offsets of `transformers` are used.
    """
    text, is_learned = small_run.BEGIN, [False] * len(small_run.BEGIN)
    for message in messages:
        head = f"{small_run.TURN}{message['role']}\n"
        said = f"{message['content']}{small_run.END}\n"
        text += head + said
        learned = message["role"] == "assistant"
        is_learned += [False] * len(head.encode()) + [learned] * len(said.encode())
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    encoded, table, num_bytes, completion = text.encode(), byte_of_character(), 0, list[int]()
    for place, name in enumerate(tokenizer.convert_ids_to_tokens(tokens)):
        own = name.encode() if name in small_run.SPECIAL else bytes(table[sign] for sign in name)
        assert encoded[num_bytes : num_bytes + len(own)] == own
        num_bytes += len(own)
        if is_learned[num_bytes - 1]:
            completion.append(place)
    return tuple(tokens), tuple(completion)


def byte_of_character() -> dict[str, int]:
    """Return the byte for each character in the name of a byte-level token, as in GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
