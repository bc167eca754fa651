"""The samples of a run: tokenised once, and kept in a file with a name that depends on its sources.

A row becomes tokens, and for each token the information whether it is predicted: in `text` every
token except the first, in `instruct` only the tokens of the assistant's turns. In `classify` the
class of the whole text is predicted. In `preference` a sample is a pair: the tokens of the chosen
side, then those of the rejected side, each with the prompt (`pairs`). A row that can't be used is a
`BadRow` with its place, never an exception. So all of them can be reported at once, or skipped
(data.on_error).

The file's name has a digest of the rows' files, the tokenizer and all settings that matter, so no
cache ever has to be deleted. Samples are flat arrays, not lists of lists: a million rows take no
more memory than their tokens, and other processes and machines read them directly.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.shared.errors import CheckpointError, RowsError, UsageError
from entrenar_py.shared.untrusted import escaping, json_text
from entrenar_py.shared.wording import counted
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.model import conversations, pairs, rows
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError
from entrenar_py.train.model.rendering import EndlessTemplateError
from entrenar_py.train.model.rows import BadRow, Row
from entrenar_py.train.model.settings import Data, Settings

# A text with more than this many characters for each allowed token is too long, and is refused
# without tokenising it, which would take 400 bytes of memory for each of its bytes. No language has
# tokens that long on average. Short texts are always tokenised. If long rows are cut, so many
# characters are tokenised: where they end only changes tokens that are cut off.
CHARS_PER_TOKEN_MAX = 64
SHORT_CHARS = 2**16
NO_LABEL = -1
_ENDLESS_MAX = 10  # rows with a template that does not end; each takes a second or more
_MANY_CHARS = re.compile(r"has \d+ characters, too many for data\.max_tokens=")


@dataclass(frozen=True)
class Sample:
    """The tokens of a row. `is_target` says for each token whether earlier tokens predict it.

    `label` is the number of the row's class, NO_LABEL if there are no classes. `cut` is the number
    of tokens of a pair's chosen side, 0 if the row is no pair.
    """

    tokens: Sequence[int]
    is_target: Sequence[bool]
    label: int = NO_LABEL
    cut: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model gets in one row; for a pair, of the longer side."""
        return max(self.cut, len(self.tokens) - self.cut)


def too_long(value: Any, max_tokens: int) -> str:
    """Return why the texts in `value` must exceed `max_tokens` tokens; "" if they may fit.

    `value` is a text, or lists and mappings of texts that are not nested deeply.
    """
    num_chars = json_text.num_chars(value)
    if num_chars <= _chars_max(max_tokens):
        return ""
    return (
        f"has {num_chars} characters, too many for data.max_tokens={max_tokens} "
        f"({CHARS_PER_TOKEN_MAX} a token)"
    )


def _chars_max(max_tokens: int) -> int:
    return max(SHORT_CHARS, CHARS_PER_TOKEN_MAX * max_tokens)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, including those that the tokenizer adds.

    A text that was rendered from a chat already begins with the BOS token, and gets no second one.
    """
    tokens = list(tokenizer(text)["input_ids"])
    first = tokenizer.bos_token_id
    is_twice = first is not None and tokens[:2] == [first, first]
    return tokens[1:] if is_twice and text.startswith(tokenizer.bos_token) else tokens


def first_tokens(tokenizer: Any, text: str, most: int) -> list[int]:
    """Return the first tokens of a text, `most` in all with those that the tokenizer adds.

    Those that it puts at the end stay there, as `tokenizer(truncation=True)` leaves them: many
    encoders were trained with one. Unlike that call, this doesn't change the tokenizer.
    """
    tokens = tokens_of(tokenizer, text)
    if len(tokens) <= most:
        return tokens
    last = _num_last(tokenizer, text)
    return [*tokens[: max(most - last, 0)], *tokens[len(tokens) - min(last, most) :]]


def open_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that an answer follows.

    They lack those that the tokenizer puts at the end, with which the text would be over.
    """
    tokens = tokens_of(tokenizer, text)
    return tokens[: len(tokens) - _num_last(tokenizer, text)] or tokens


def _num_last(tokenizer: Any, text: str) -> int:
    """Return the number of tokens that the tokenizer puts at the end of a text."""
    is_added = tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
    return len(list(itertools.takewhile(bool, reversed(is_added))))


class _BadValueError(ValueError):
    """Raised for a row's value that can't be used; says what to use instead."""


class Encoder:
    """Encodes rows with a run's settings and the tokenizer of its checkpoint."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        """Raises UsageError if the tokenizer has no chat template, which `instruct` needs."""
        self._settings, self._tokenizer = settings, tokenizer
        self._encode: Callable[[Mapping[str, Any]], Sample] = {
            "classify": self._classified,
            "instruct": self._instructed,
            "preference": self._preferred,
            "text": self._plain,
        }[settings.task]
        if settings.task == "instruct" and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"model={settings.model}: its tokenizer has no chat template, which task: instruct "
                "needs; use the checkpoint of a chat model, or task: text"
            )
        self._num_endless = 0
        self.num_cut = 0  # samples so far that were cut after data.max_tokens
        # pairs so far with other tokens in the prompt alone, or conversations with a last turn that
        # doesn't follow the generation prompt
        self.num_unaligned = 0

    @cached_property
    def _chats(self) -> ChatEncoder:
        """The encoder of chats, created for the first one: it may copy the tokenizer."""
        return ChatEncoder(self._tokenizer, self._settings.data.date)

    def encode(self, row: Row) -> Sample | BadRow:
        """Return the sample of a row, or why it can't be used.

        Raises UsageError if the chat template has taken too many steps for too many rows.
        """
        try:
            sample = self._encode(row.fields)
        except EndlessTemplateError as problem:
            self._num_endless += 1
            if self._num_endless == _ENDLESS_MAX:
                raise UsageError(
                    f"model={self._settings.model}: {problem}; this happened in {_ENDLESS_MAX} "
                    f"rows, the last at {row.place}"
                ) from problem
            return BadRow(row.place, str(problem))
        except RecursionError:
            return BadRow(row.place, "is nested too deeply")
        except (_BadValueError, BadConversationError) as problem:
            return BadRow(row.place, escaping.shortened(escaping.exact(problem)))
        most, length = self._settings.data.max_tokens, sample.num_tokens
        if length > most:
            if self._settings.data.truncates:
                return self._cut(row, sample, most)
            told = f"has {length} tokens; data.max_tokens allows {most}"
            return BadRow(row.place, told, length)
        return sample

    def _cut(self, row: Row, sample: Sample, most: int) -> Sample | BadRow:
        """Return the first `most` tokens of a sample, unless nothing of them is learned."""
        targets = sample.is_target[:most]
        if sample.label == NO_LABEL and not any(targets):
            total = len(sample.tokens)
            return BadRow(row.place, f"has nothing to predict in {most} of its {total} tokens")
        self.num_cut += 1
        tokens = sample.tokens[:most]
        if self._settings.task == "classify":
            text = self._text(row.fields)[: _chars_max(most)]
            tokens = first_tokens(self._tokenizer, text, most)
        return replace(sample, tokens=tokens, is_target=targets)

    def _plain(self, fields: Mapping[str, Any]) -> Sample:
        tokens = self._tokens(self._text(fields))
        end = self._tokenizer.eos_token_id
        if end is not None and tokens[-1] != end:
            tokens = [*tokens, end]
        if len(tokens) < 2:
            raise _BadValueError("has one token, and nothing to predict")
        return Sample(tokens, [False, *[True] * (len(tokens) - 1)])

    def _classified(self, fields: Mapping[str, Any]) -> Sample:
        name, labels = self._settings.data.label_field, self._settings.classes.labels
        tokens = self._tokens(self._text(fields))
        label = _name_of(self._field(fields, name))
        if label not in labels:
            told = f"classes.labels has {', '.join(labels)}{_hint(label, len(labels))}"
            raise _BadValueError(f"{name}={fields[name]!r}: {told}")
        return Sample(tokens, [False] * len(tokens), labels.index(label))

    def _instructed(self, fields: Mapping[str, Any]) -> Sample:
        conversation = conversations.read(fields, self._settings.data.messages_field)
        self._require_short([conversation.messages, conversation.tools])
        tokens, is_target, is_aligned = self._chats.encode(conversation)
        self.num_unaligned += not is_aligned
        is_target = [False, *is_target[1:]]  # the first token can't be predicted from anything
        if not any(is_target):
            raise _BadValueError("has one token, and nothing to predict")
        return Sample(tokens, is_target)

    def _preferred(self, fields: Mapping[str, Any]) -> Sample:
        pair = pairs.read(fields)
        self._require_short(pair.contents)
        if isinstance(pair, pairs.Texts):
            tokenise = partial(open_tokens, self._tokenizer)
            encoded = pairs.of_texts(pair, tokenise, self._tokenizer.eos_token_id)
        else:
            if not getattr(self._tokenizer, "chat_template", None):
                raise _BadValueError(
                    "has messages, but the tokenizer has no chat template; use texts, or the "
                    "checkpoint of a chat model"
                )
            encoded = self._chats.pair(pair)
        pairs.require_different(encoded)
        self.num_unaligned += not encoded.is_aligned
        chosen, rejected = encoded.chosen, encoded.rejected
        # The first token of a row can't be predicted from anything.
        starts = max(encoded.num_prompt, 1)
        is_target = [
            place >= starts for tokens in (chosen, rejected) for place in range(len(tokens))
        ]
        return Sample([*chosen, *rejected], is_target, cut=len(chosen))

    def _text(self, fields: Mapping[str, Any]) -> str:
        name = self._settings.data.text_field
        text = self._field(fields, name)
        if not isinstance(text, str) or not text.strip():
            raise _BadValueError(f"{name}={text!r}: use a text that is not empty")
        return text

    def _field(self, fields: Mapping[str, Any], name: str) -> Any:
        if name not in fields:
            raise _BadValueError(
                f"has no field {name!r}; it has {', '.join(fields) or 'none'}; data.text_field and "
                "data.label_field name others"
            )
        return fields[name]

    def _require_short(self, value: Any) -> None:
        if problem := too_long(value, self._settings.data.max_tokens):
            ends = "; data.on_long: truncate cuts no row that is so long"
            raise _BadValueError(problem + (ends if self._settings.data.truncates else ""))

    def _tokens(self, text: str) -> list[int]:
        data = self._settings.data
        if data.truncates and too_long(text, data.max_tokens):
            tokens = tokens_of(self._tokenizer, text[: _chars_max(data.max_tokens)])
            if len(tokens) > data.max_tokens:  # else its tokens are as long as in no language
                return tokens
        self._require_short(text)
        tokens = tokens_of(self._tokenizer, text)
        if not tokens:
            raise _BadValueError("has no token")
        return tokens


def _name_of(label: object) -> str:
    """Return a label as a configuration writes it: 1 also for 1.0, as in a column with gaps."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label) if isinstance(label, str | int | float) else ""


def _hint(label: str, num_labels: int) -> str:
    if label in ("false", "true"):
        return "; a truth value is a class name, not an index: use labels: [false, true]"
    places = [str(place) for place in range(num_labels)]
    if label in places:
        return f"; a number is a class name, not an index: use labels: [{', '.join(places)}]"
    return ""


# of the file, and of what is learned from a row; files of other versions are created again
VERSION = 9
_SHOWN = 20  # bad rows in a message


@dataclass(frozen=True)
class Samples:
    """Samples one after another: sample i has `tokens[starts[i]:starts[i + 1]]`.

    `tokens` is int32 and `is_target` bool, both [all tokens]; `starts` is int64 [n + 1]; `labels`
    is int32 [n]. `cuts` is int32 [n] for pairs, the number of tokens of each chosen side; otherwise
    it is empty. `skipped` has the rows that could not be used. `num_cut` of all rows were cut, and
    the answers of `num_unaligned` don't follow what the model is asked with: a prompt of a pair has
    other tokens alone, or the template's generation prompt is another one.
    """

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    starts: NDArray[np.int64]
    labels: NDArray[np.int32]
    cuts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    skipped: tuple[BadRow, ...] = ()
    num_cut: int = 0
    num_unaligned: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def are_pairs(self) -> bool:
        """True if each sample is a pair of a chosen and a rejected side."""
        return len(self.cuts) > 0

    @cached_property
    def rows(self) -> Samples:
        """The rows for the model. A pair has two: the chosen side, then the rejected side."""
        if not self.are_pairs:
            return self
        inner = self.starts[:-1] + self.cuts
        return Samples(
            tokens=self.tokens,
            is_target=self.is_target,
            starts=np.append(np.column_stack([self.starts[:-1], inner]), self.starts[-1]),
            labels=np.full(2 * len(self), NO_LABEL, np.int32),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample's row (of a pair, of its longer row): int64 [n]."""
        each = np.diff(self.rows.starts)
        found: NDArray[np.int64] = each.reshape(-1, 2).max(1) if self.are_pairs else each
        return found

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row, 0 without samples."""
        return int(self.lengths.max(initial=0))

    def part(self, index: int) -> slice:
        """Return the slice of the tokens of sample `index`."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def length(self, index: int) -> int:
        """Return the number of tokens of sample `index`."""
        return int(self.starts[index + 1] - self.starts[index])

    @cached_property
    def num_targets(self) -> NDArray[np.int64]:
        """The number of tokens to predict in each sample, int64 [n]."""
        before = np.concatenate([[0], np.cumsum(self.is_target, dtype=np.int64)])
        counts: NDArray[np.int64] = np.diff(before[self.starts])
        return counts

    @cached_property
    def digest(self) -> str:
        """32 hex digits over all samples."""
        hasher = blake3()
        for array in (self.tokens, self.is_target, self.starts, self.labels, self.cuts):
            hasher.update(np.ascontiguousarray(array).data.cast("B"))
        return hasher.hexdigest(16)

    @property
    def is_consistent(self) -> bool:
        """True if the arrays fit each other. An array from a file may hold anything."""
        starts, num_tokens = self.starts, len(self.tokens)
        shapes = (self.tokens.ndim, self.is_target.shape, starts.shape, self.labels.ndim)
        return bool(
            shapes == (1, (num_tokens,), (len(self.labels) + 1,), 1)
            and starts.dtype == np.int64
            and (starts[0], starts[-1]) == (0, num_tokens)
            and (np.diff(starts) > 0).all()
            and (not self.are_pairs or self._are_cut())
        )

    def _are_cut(self) -> bool:
        """Return whether each pair is cut into two sides with a token to predict."""
        cuts = self.cuts
        if cuts.shape != self.labels.shape or not np.issubdtype(cuts.dtype, np.integer):
            return False
        is_within = (cuts > 0) & (cuts < np.diff(self.starts))
        return bool(is_within.all() and (self.rows.num_targets > 0).all())

    def chosen(self, indices: Sequence[int]) -> Samples:
        """Return the samples with these `indices`, in their order. An index may be repeated."""
        parts = [np.arange(self.starts[i], self.starts[i + 1]) for i in indices]
        places = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        lengths = [len(part) for part in parts]
        return Samples(
            tokens=self.tokens[places],
            is_target=self.is_target[places],
            starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            labels=self.labels[list(indices)],
            cuts=self.cuts[list(indices)] if self.are_pairs else self.cuts,
            skipped=self.skipped,
            num_cut=self.num_cut,
            num_unaligned=self.num_unaligned,
        )


def load(settings: Settings, path: Path, tokenizer: Any, *, cache: Path) -> Samples:
    """Return the samples of the rows at `path`, from the folder `cache` if they are there.

    Raises UsageError if no row can be used, and RowsError for rows that can't be used unless these
    are skipped.
    """
    kept = cache / f"{_key(settings, path, tokenizer)}.samples"
    samples = read_kept(kept)
    if samples is None:
        samples = _encoded(settings, path, Encoder(settings, tokenizer))
        _keep(kept, samples)
    require_usable(settings.data, f"data {path}", samples.skipped, len(samples))
    if not len(samples):
        example = (
            f"the first is {samples.skipped[0]}" if samples.skipped else "give one that has rows"
        )
        raise UsageError(f"data {path}: has no row that can be used; {example}")
    return samples


def keep_chosen(samples: Samples, folder: Path) -> Path:
    """Write samples to a file of `folder` for `read_kept`, and return its path.

    The file is named after their digest, and doesn't contain the skipped rows. Raises UsageError if
    it can't be written.
    """
    path = folder / f"{samples.digest}.samples"
    if read_kept(path) is None:
        _keep(path, replace(samples, skipped=()))
    return path


def listed(skipped: Sequence[BadRow]) -> list[str]:
    """Return a line for each of the first rows, and one line that counts the others."""
    more = len(skipped) - _SHOWN
    return [f"  {one}" for one in skipped[:_SHOWN]] + ([f"  and {more} more"] if more > 0 else [])


def require_usable(data: Data, where: str, skipped: Sequence[BadRow], num_good: int) -> None:
    """Raise RowsError if there are rows that can't be used, unless the settings skip them."""
    kinds = [(bad, _decided_by(data, bad)) for bad in skipped]
    stopping = [(bad, key) for bad, key in kinds if getattr(data, key) == "stop"]
    if stopping:
        total = counted(len(skipped) + num_good, "row")
        problem = f"{where}: {len(stopping)} of {total} can't be used"
        keys = " and ".join(f"data.{key}: skip" for key in sorted({key for _, key in stopping}))
        lines = [f"{problem}; fix them, or set {keys}", *listed([bad for bad, _ in stopping])]
        raise RowsError("\n".join(lines))


def _decided_by(data: Data, bad: BadRow) -> str:
    """Return the key of `data` that says what is done about a row that can't be used."""
    is_long = bad.num_tokens is not None or _MANY_CHARS.match(bad.problem) is not None
    return "on_long" if is_long and data.on_long in ("stop", "skip") else "on_error"


def skipped_by(data: Data, skipped: Sequence[BadRow]) -> str:
    """Return the settings by which the rows are skipped, such as `data.on_error: skip`."""
    return ", ".join(sorted({f"data.{_decided_by(data, bad)}: skip" for bad in skipped}))


def _key(settings: Settings, path: Path, tokenizer: Any) -> str:
    """Return a name that differs if files, tokenizer or a setting that matters differ."""
    data = settings.data
    facts = {
        "version": VERSION,
        "files": [[str(file), _file_digest(file)] for file in rows.files(path)],
        "tokenizer": tokenizer_digest(tokenizer),
        "transformers": metadata.version("transformers"),  # it renders chat templates
        "task": settings.task,
        "fields": [data.text_field, data.label_field, data.messages_field],
        "max_tokens": data.max_tokens,
        "date": data.date,
        "labels": list(settings.classes.labels),
    }
    if data.truncates:
        facts["cut"] = True
    return blake3(json.dumps(facts).encode()).hexdigest(16)


def _file_digest(path: Path) -> str:
    hasher = blake3()
    try:
        hasher.update_mmap(path)
    except OSError as error:
        problem = f"can't be read ({error.strerror or error}); give a file that can be read"
        raise UsageError(f"data {path}: {problem}") from error
    return hasher.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return 32 hex digits over a tokenizer: its rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    told = [rules, special, getattr(tokenizer, "chat_template", None)]
    return blake3(json.dumps(told, default=str).encode()).hexdigest(16)


def read_kept(path: Path) -> Samples | None:
    """Return the samples in the file at `path`; None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        arrays, facts = checkpoint.load(path)
        return Samples(
            tokens=arrays["tokens"],
            is_target=arrays["is_target"].astype(np.bool_),
            starts=arrays["starts"],
            labels=arrays["labels"],
            cuts=arrays.get("cuts", np.zeros(0, np.int32)),
            skipped=tuple(BadRow(**one) for one in facts["skipped"]),
            num_cut=int(facts.get("num_cut", 0)),
            num_unaligned=int(facts.get("num_unaligned", 0)),
        )
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


def _keep(path: Path, samples: Samples) -> None:
    arrays = {name: getattr(samples, name) for name in ("tokens", "starts", "labels")}
    arrays["is_target"] = samples.is_target.astype(np.uint8)
    if samples.are_pairs:
        arrays["cuts"] = samples.cuts
    # A unique name: another process or host may be writing the same samples.
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "skipped": [asdict(one) for one in samples.skipped],
            "num_cut": samples.num_cut,
            "num_unaligned": samples.num_unaligned,
        }
        checkpoint.save(own, arrays, facts)
        own.replace(path)
    except OSError as error:
        raise UsageError(
            f"tokenised rows can't be kept in {path.parent} ({error.strerror or error}); make room "
            "there, or set XDG_CACHE_HOME to another folder"
        ) from error


def _encoded(settings: Settings, path: Path, encoder: Encoder) -> Samples:
    encoded, skipped = list[Sample](), list[BadRow]()
    for row in rows.read(path):
        sample = row if isinstance(row, BadRow) else encoder.encode(row)
        if isinstance(sample, BadRow):
            skipped.append(sample)
        else:
            encoded.append(sample)
    lengths = [len(sample.tokens) for sample in encoded]
    return Samples(
        tokens=np.array([token for sample in encoded for token in sample.tokens], np.int32),
        is_target=np.array([flag for sample in encoded for flag in sample.is_target], np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        labels=np.array([sample.label for sample in encoded], np.int32),
        cuts=np.array([sample.cut for sample in encoded if sample.cut], np.int32),
        skipped=tuple(skipped),
        num_cut=encoder.num_cut,
        num_unaligned=encoder.num_unaligned,
    )


# --- samples of a run -----------------------------------------------------------------------------


def split(samples: Samples, share: float, rng: np.random.Generator) -> tuple[Samples, Samples]:
    """Return the samples to train on, and the fraction `share` to evaluate on, drawn with `rng`."""
    num_kept = round(share * len(samples))
    kept = np.sort(rng.permutation(len(samples))[:num_kept])
    rest = np.setdiff1d(np.arange(len(samples)), kept)
    return samples.chosen(rest.tolist()), samples.chosen(kept.tolist())


def oversampled(samples: Samples) -> Samples:
    """Return the samples, then copies of those of rarer classes, until classes are balanced.

    Each copy is a sample of its own.
    """
    counts = Counter(samples.labels.tolist())
    most = max(counts.values())
    copies = list[int]()
    for label, count in sorted(counts.items()):
        (own,) = np.nonzero(samples.labels == label)
        copies += np.resize(own, most - count).tolist()
    return samples.chosen([*range(len(samples)), *copies])


def class_counts(found: Samples, labels: Sequence[str]) -> tuple[int, ...]:
    """Return the number of samples of each class."""
    return tuple(np.bincount(found.labels, minlength=len(labels)).tolist())


def require_rows(counts: Sequence[int], labels: Sequence[str], setting: str, other: str) -> None:
    """Raise UsageError if a class has no sample, which `setting` needs.

    `other` says what to do if the class should stay without samples.
    """
    if not all(counts):
        raise UsageError(
            f"{setting}: class {labels[int(np.argmin(counts))]!r} has no row to train on; leave it "
            f"out of classes.labels, or {other}"
        )


def class_weights(samples: Samples, kind: str, labels: Sequence[str]) -> tuple[float, ...]:
    """Return each class's weight in the loss. Their mean over the samples is 1.

    Raises UsageError if a class has no sample, unless all weights are 1.
    """
    if kind == "none":
        return (1.0,) * len(labels)
    counts = np.bincount(samples.labels, minlength=len(labels))
    require_rows(counts.tolist(), labels, f"classes.weights={kind}", "use none")
    raw = (len(samples) / counts) ** (1.0 if kind == "inverse" else 0.5)
    mean = float((raw * counts).sum() / len(samples))
    return tuple(float(weight / mean) for weight in raw)
