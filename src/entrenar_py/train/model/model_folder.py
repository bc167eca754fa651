"""Checks a checkpoint's folder: complete, of a supported kind, fitting the run, and harmless.

Python code of a checkpoint runs only with the user's consent (`trust_remote_code`). Other keys make
transformers, peft or tokenizers fetch something, import a module, or read files that have no
recorded digest. Consent doesn't cover these, so they are refused before a library sees them.
`require_offline` also keeps the libraries off the network, which they would use even without any
key (kernels for a kind of model).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from blake3 import blake3
from torch import nn

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, files, json_text
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Settings

CONFIG, TOKENIZER, ADAPTERS = "config.json", "tokenizer_config.json", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
RUN = "run.json"  # in a run's output folder: its settings, for later commands
DIGESTS = "digests"  # a key in RUN: the digests of the run's model and tokenizer
# Values of these keys name installed code, such as `sdpa`, or `owner/name` of a hub.
_CODE = ("attn_implementation", "experts_implementation")
# Keys of adapter_config.json that `entrenar` sets, or peft for its adapters of experts. All others
# have peft's default; another value may import a module (`megatron_core`), load another model, or
# read the adapters from a file.
_OWN = frozenset(
    {
        *("alpha_pattern", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type"),
        *("peft_version", "r", "rank_pattern", "target_modules", "target_parameters", "task_type"),
        *("use_dora", "use_rslora"),
    }
)


def record(path: Path, owner: str) -> Mapping[str, Any]:
    """Return the JSON object in the file at `path`.

    Raises UsageError, with a message that begins with `owner`, if there is none.
    """
    record: object = None
    what = "the checkpoint" if path.name == CONFIG else "it"
    try:
        record = json_text.load(files.read(path, bytes_max=_JSON_BYTES_MAX))
        problem = "" if isinstance(record, dict) else "it is not a JSON object"
    except (OSError, ValueError) as error:
        problem = str(error)
    if not isinstance(record, dict):
        raise UsageError(f"{owner}: {path.name} can't be read ({problem}); copy {what} again")
    return record


def require_offline() -> None:
    """Keep the Hugging Face libraries off the network. Call it before they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def require_model(folder: Path) -> None:
    """Raise UsageError if config.json in `folder` makes a library fetch code or other weights."""
    config = record(folder / CONFIG, f"model={folder}")
    for key, value in _nested(config):
        if key.lstrip("_").removesuffix("_internal") in _CODE:
            for name in _texts(value):
                if "/" in name or ":" in name:
                    _refuse(folder, CONFIG, key, name, "use sdpa or eager, or leave it out")
    if (other := config.get("transformers_weights")) is not None:
        advice = "leave it out: weights are model.safetensors, or the files in its index"
        _refuse(folder, CONFIG, "transformers_weights", other, advice)


def require_tokenizer(folder: Path) -> None:
    """Raise UsageError if tokenizer_config.json in `folder` makes a library fetch a file."""
    if not (folder / TOKENIZER).is_file():
        return
    for key, value in _nested(record(folder / TOKENIZER, str(folder))):
        if key.endswith("_file") and isinstance(value, str) and "://" in value:
            _refuse(folder, TOKENIZER, key, value, "leave it out, and copy that file there")


def require_adapters(folder: Path, owner: str | None = None) -> None:
    """Raise UsageError unless `folder` has adapters of the kind that `entrenar` writes.

    They must be of type LORA, with peft's default for each key that `entrenar` does not set. The
    message begins with `owner`, by default the folder.
    """
    import peft

    owner = owner or str(folder)
    if not folder.is_dir():
        raise UsageError(f"{owner}: no such folder; give the output folder of a run with adapters")
    config = record(folder / ADAPTERS, owner)
    usual = peft.LoraConfig().to_dict()
    if (kind := config.get("peft_type")) != "LORA":
        _refuse_adapters(owner, "peft_type", kind, "LORA")
    for key, value in config.items():
        if key in usual and key not in _OWN and value and value != usual[key]:
            _refuse_adapters(owner, key, value, usual[key])
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UsageError(
            f"{owner}: no {ADAPTER_WEIGHTS} there; give the output folder as the run wrote it"
        )


def _refuse_adapters(owner: str, key: str, value: object, usual: object) -> None:
    raise UsageError(
        f"{owner}: {ADAPTERS} has {key}={_shown(value)}, and only {_shown(usual)} is accepted, as "
        "every run writes it: other values may let peft change the weights below the adapters, or "
        "import or read something outside this folder; give the output as a run wrote it"
    )


def adapters_digest(folder: Path) -> str:
    """Return 32 hex digits over the adapters' weights in `folder`."""
    return blake3().update_mmap(folder / ADAPTER_WEIGHTS).hexdigest(16)


def require_base(adapters: Path, model: Path, digest: str) -> None:
    """Raise UsageError if a run trained `adapters` on another model than the one in `model`.

    `digest` is that model's digest. A folder that no run wrote, or an older release, has none.
    """
    path = adapters / RUN
    noted = record(path, str(adapters)).get(DIGESTS) if path.is_file() else None
    due = noted.get("model") if isinstance(noted, dict) else None
    if due is not None and due != digest:
        raise UsageError(
            f"lora.start_from={adapters}: its adapters were trained on a different model from "
            f"{model}, which has the digest {digest}; the model of their run had {due}. Train that "
            "checkpoint, or leave start_from out; if it is the same model in other files, start "
            f"from a copy of {adapters} without {RUN}"
        )


def _refuse(folder: Path, name: str, key: str, value: object, advice: str) -> None:
    raise UsageError(
        f"{folder}: {name} has {key}={_shown(value)}, which makes a library fetch, import "
        f"or read something outside this folder; {advice}"
    )


def _shown(value: object) -> str:
    return escaping.shortened(json.dumps(value, ensure_ascii=False))


def _nested(found: object) -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values, including those of nested objects (`text_config`)."""
    waiting = [found]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from part.items()
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for _, inner in _nested(value):
        if isinstance(inner, str):
            yield inner


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_POOLER = "pooler."
_JSON_BYTES_MAX = 2**26
_NUMBERS = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors for weights that aren't quantised
# Weights of older checkpoints that a model now computes, or holds elsewhere.
_COMPUTED = re.compile(r"(^|\.)(rotary_\w+\.(inv_freq|cos_cached|sin_cached)|position_ids)$")
_MASK = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$")
_ADAPTER = re.compile(r"lora_|\.base_layer\.|modules_to_save")
# with these, max_position_embeddings may be the number before stretching
_STRETCHED = ("linear", "dynamic", "yarn")
_ROUTER_LOSSES = ("router_aux_loss_coef", "aux_loss_coef")
# Parts that our tasks don't use: an encoder's pooler and head for the next sentence, and a
# decoder's layers for predicting several tokens at a time.
_UNUSED = re.compile(r"pooler\.|cls\.seq_relationship\.|mtp")
_SHOWN = 3  # missing files or weights in a message


def require_config(folder: Path) -> None:
    """Raise UsageError unless `folder` has a model's configuration and no adapters.

    Also raises it if the configuration makes a library do more than read that folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"model={folder}: no such folder; give one with a checkpoint in Hugging Face's format "
            "(nothing is downloaded)"
        )
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"model={folder}: it has adapters (adapter_config.json), and only whole models are "
            "trained; give the model below them, or add them to it by entrenar merge"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"model={folder}: no config.json there; give the folder of a checkpoint in Hugging "
            "Face's format"
        )
    require_model(folder)


def require_checkpoint(folder: Path) -> None:
    """Raise UsageError unless `folder` has a configuration and all files of weights."""
    weight_files(folder)


def weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files that are loaded. Raises as `require_checkpoint` does.

    A folder may also have other sets of weights.
    """
    require_config(folder)
    if (folder / WHOLE).is_file():
        return [WHOLE]
    if not (folder / INDEX).is_file():
        raise UsageError(
            f"model={folder}: neither {WHOLE} nor {INDEX} is there; only safetensors are read, so "
            "convert weights in another format"
        )
    shards = _shards(folder / INDEX)
    if outside := [name for name in shards if Path(name).name != name]:
        raise UsageError(
            f"model={folder}: {INDEX} names {escaping.shortened(outside[0])}; weights have to be "
            "in the same folder, under plain names"
        )
    lost = [name for name in shards if not (folder / name).is_file()]
    if lost:
        raise UsageError(
            f"model={folder}: {_listed(lost)} missing, of the {len(shards)} files that {INDEX} "
            "names; copy the whole checkpoint"
        )
    return shards


def require_numbers(folder: Path) -> None:
    """Raise UsageError unless all weight files can be read and none is quantised.

    If config.json says nothing about quantisation, transformers would use the codes as weights.
    Only the headers of files are read.
    """
    import safetensors

    for name in weight_files(folder):
        try:
            with safetensors.safe_open(folder / name, "pt") as opened:
                kinds = {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise UsageError(
                f"model={folder}: {name} is not a complete safetensors file ({error}); copy "
                "the checkpoint again"
            ) from error
        for key, kind in kinds.items():
            if key.endswith(".weight") and kind not in _NUMBERS:
                raise UsageError(
                    f"model={folder}: {name} has {escaping.shortened(key)} in {kind}, so its "
                    "weights are quantised already; give the checkpoint that they were made from, "
                    "with method: qlora"
                )


def require_shapes(folder: Path, mismatched: Collection[tuple[str, Any, Any]]) -> None:
    """Raise UsageError if a weight has different shapes in the files and in the model."""
    for name, found, expected in sorted(mismatched):
        raise UsageError(
            f"model={folder}: {escaping.shortened(name)} has the shape {list(found)} in "
            f"its files, but {list(expected)} by config.json and the settings; use "
            "files and settings that fit together"
        )


def digest(folder: Path) -> str:
    """Return 32 hex digits over a checkpoint's configuration and weights; reads all of them.

    Raises UsageError if a file is missing or can't be read.
    """
    hasher = blake3()
    for name in ("config.json", *weight_files(folder)):
        part = blake3(max_threads=blake3.AUTO)
        try:
            part.update_mmap(folder / name)
        except OSError as error:
            problem = f"{name} can't be read ({error.strerror or error})"
            raise UsageError(f"model={folder}: {problem}; give access to it") from error
        hasher.update(name.encode() + b"\0" + part.digest())
    return hasher.hexdigest(16)


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index lists, sorted."""
    try:
        index_file = json_text.load(files.read(index, bytes_max=_JSON_BYTES_MAX))
        named = index_file["weight_map"].values()
        names = sorted({str(name) for name in named})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"model={index.parent}: {INDEX} can't be read ({error!r}); copy the checkpoint again"
        ) from error
    return names


def require_weights(folder: Path, module: nn.Module, missing: Collection[str]) -> list[str]:
    """Return the parts of `module` that are new; `missing` are weights that `folder` lacks.

    Only a head may be new, and the pooler under it, which encoders without a classifier may lack.
    Raises UsageError if another weight of the base model is missing, since it would keep random
    values.
    """
    base = f"{cast('Any', module).base_model_prefix}."
    above = [name.removeprefix(base + _POOLER) for name in missing]
    lost = sorted(name for name in above if name.startswith(base))
    if lost:
        raise UsageError(
            f"model={folder}: its files lack {len(lost)} of the model's weights, {_listed(lost)} "
            "missing; copy the whole checkpoint, or fix its config.json"
        )
    return sorted({name.removeprefix(base).partition(".")[0] for name in missing})


def require_known(settings: Settings, module: nn.Module, unexpected: Collection[str]) -> list[str]:
    """Return the parts of the checkpoint that the task replaces or doesn't use.

    `unexpected` are weights in its files that `module` lacks. Raises UsageError for other such
    weights: without them the model is not the checkpoint's, and transformers would only warn.
    """
    folder, parts, surplus = settings.model, set[str](), list[str]()
    for name in sorted(unexpected):
        if _COMPUTED.search(name) or (_MASK.search(name) and _is_mask(folder, name)):
            continue
        if (head := _head_of(module, name, settings.task)) is None:
            surplus.append(name)
        else:
            parts.add(head)
    if surplus:
        raise UsageError(
            f"model={folder}: {_listed(surplus)} in its files, and not in the model by "
            "config.json, which would be trained without them; fix config.json "
            "(attention_bias, num_hidden_layers, ...), merge adapters that are saved "
            "inside, or remove from the files what does not belong to the model"
        )
    return sorted(parts)


def _head_of(module: nn.Module, name: str, task: str) -> str | None:
    """Return the part that has the weight `name` if the task has no use for it, else None."""
    model = cast("Any", module)
    prefix = f"{model.base_model_prefix}."
    part = name.removeprefix(prefix).partition(".")[0]
    if _UNUSED.match(name.removeprefix(prefix)):
        return part
    is_within = name.startswith(prefix) or hasattr(getattr(module, prefix[:-1], None), part)
    is_adapter = part == "base_model" or _ADAPTER.search(name) is not None
    return None if task != "classify" or is_within or is_adapter else part


def _is_mask(folder: Path, name: str) -> bool:
    """Return whether the weight `name` is a causal mask, [1, 1, n, n], or a single number."""
    import safetensors

    for file in weight_files(folder):
        with safetensors.safe_open(folder / file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if f".{name}".endswith(f".{key}"):
                    shape = opened.get_slice(key).get_shape()
                    return len(shape) == 0 or (len(shape) == 4 and list(shape[:2]) == [1, 1])
    return False


def require_tied(folder: Path, module: nn.Module) -> None:
    """Raise UsageError if config.json ties a head to the embeddings, but the files don't."""
    model = cast("Any", module)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if not model.config.get_text_config().tie_word_embeddings or head is None:
        return
    names = dict(map(reversed, module.named_modules(remove_duplicate=False)))
    name, source = f"{names[head]}.weight", f"{names[table]}.weight"
    if name in (model._tied_weights_keys or ()) and head.weight is not table.weight:
        raise UsageError(
            f"model={folder}: config.json ties {name} to {source} "
            "(tie_word_embeddings), and its files have both, with different values; "
            f"use tie_word_embeddings: false if both are the model's, or take {name} "
            "out of the files"
        )


def beside_text(module: nn.Module) -> list[str]:
    """Return the names of the parts through which no text passes, such as those for images."""
    model = cast("Any", module)
    if model.config.get_text_config() is model.config:
        return []
    decoder = model.get_decoder()
    name = next(name for name, part in module.named_modules() if part is decoder)
    above, _, last = name.rpartition(".")
    children = module.get_submodule(above).named_children() if above else ()
    return [f"{above}.{child}" for child, _ in children if child != last]


def _listed(names: list[str]) -> str:
    shown = ", ".join(escaping.shortened(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def require_tokens(module: nn.Module, tokens: Iterable[int], *, folder: Path) -> None:
    """Raise UsageError if the model has no embedding for one of `tokens`."""
    most = max(tokens, default=0)
    rows: int = cast("Any", module).get_input_embeddings().num_embeddings
    if most >= rows:
        raise UsageError(
            f"model={folder}: its tokenizer does not fit: it produces token {most}, but the "
            f"model has embeddings of tokens 0 to {rows - 1}; use the tokenizer that the model "
            "was trained with"
        )


def require_samples(
    settings: Settings, module: nn.Module, parts: Iterable[Samples | None], pad_token: int
) -> None:
    """Raise UsageError unless the model takes all samples, and rows of `data.max_tokens` tokens."""
    tokens = [int(one.tokens.max()) for one in parts if one is not None and len(one)]
    require_tokens(module, [pad_token, *tokens], folder=settings.model)
    most, limit = settings.data.max_tokens, longest(module)
    if limit is not None and most > limit:
        raise UsageError(
            f"data.max_tokens={most} with {settings.model}: the model takes rows of {limit} tokens "
            f"at most (max_position_embeddings in config.json); use max_tokens <= {limit}"
        )


def require_own_loss(settings: Settings, module: nn.Module) -> None:
    """Raise UsageError if config.json requests a router's auxiliary loss, which is not added here.

    It is a product of means over all tokens of a batch, so it isn't a sum over the batch's parts.
    Workers could not share it and get the same bits as one worker.
    """
    config = cast("Any", module).config.get_text_config()
    if settings.task == "classify" or not getattr(config, "output_router_logits", False):
        return  # transformers' own classifiers add none
    for key in _ROUTER_LOSSES:
        if share := getattr(config, key, None):
            raise UsageError(
                f"model={settings.model}: config.json demands a router's auxiliary loss "
                f"(output_router_logits: true, {key}: {share:g}), which entrenar does not add: "
                "it is not a sum over the parts of a batch; set output_router_logits: false "
                "there to train without it"
            )


def longest(module: nn.Module) -> int | None:
    """Return the number of tokens for which the model has positions; None if it has no limit."""
    config = cast("Any", module).config.get_text_config()
    limits = [_positions(config)]
    for name, layer in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(layer, nn.Embedding):
            # RoBERTa's positions begin after the position of padding.
            unused = 0 if layer.padding_idx is None else layer.padding_idx + 1
            limits.append(layer.num_embeddings - unused)
    return min((one for one in limits if isinstance(one, int) and one > 0), default=None)


def _positions(config: Any) -> int | None:
    """Return the number of positions in a configuration, None if it doesn't say.

    Rotary positions may be stretched by a factor. `llama3` and `longrope` state the number after
    stretching, and other kinds may, too. If layers differ, the smallest number counts.
    """
    number = getattr(config, "max_position_embeddings", None)
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in found.values() if isinstance(kind, dict)] or [found]
    if not isinstance(number, int):
        return None
    return min(max(number, _stretched(kind, number)) for kind in kinds)


def _stretched(rope: Mapping[str, Any], number: int) -> int:
    factor, before = rope.get("factor"), rope.get("original_max_position_embeddings") or number
    if rope.get("rope_type") not in _STRETCHED or not isinstance(factor, int | float):
        return number
    return int(factor * before)


_TOLD_CHARS = 300
# Parts of warnings that are not shown. They are about weights that are missing, unknown or of a
# different shape (see above), about rows that are too long (`data.max_tokens`), and about sampling
# settings of a checkpoint, since answers use the most likely tokens.
_OWN_WORDS = (
    "LOAD REPORT",
    "Token indices sequence length is longer than",
    "generation flags are not valid",
)


def class_of(settings: Settings) -> tuple[Any, dict[str, Any]]:
    """Return the transformers class that creates the model, and its additions to config.json."""
    kind, options = _kind(settings.task), dict[str, Any]()
    if settings.task == "classify":
        labels = settings.classes.labels
        options["num_labels"] = len(labels)
        options["id2label"] = dict(enumerate(labels))
        options["label2id"] = {label: number for number, label in enumerate(labels)}
    return kind, options


def _kind(task: str) -> Any:
    transformers = library()
    if task == "classify":
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForCausalLM


def shortened_class(
    kind: Any, config: Any, shorten: Callable[[nn.Module], None], *, unties: bool
) -> Any:
    """Return a subclass of the model class for `config`, with a constructor that calls `shorten`.

    `kind` is the Auto class that knows the model class. `shorten` gets the new model, at the end.
    With `unties`, the model's embedding and head don't share a tensor.
    """
    whole: Any = kind._model_mapping[type(config)]

    def made(self: Any, config: Any, *given: Any, **named: Any) -> None:
        if unties:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        whole.__init__(self, config, *given, **named)
        shorten(self)

    names = {"__init__": made, "__module__": whole.__module__, "__qualname__": whole.__qualname__}
    shortened: Any = type(whole.__name__, (whole,), names)

    def from_config(config: Any, *, dtype: Any = None, trust_remote_code: bool = False) -> Any:
        """Make a model from a configuration, as an Auto class does."""
        assert not trust_remote_code, "such a model has no class to shorten"
        return shortened._from_config(config, dtype=dtype)

    shortened.from_config = from_config
    return shortened


def configuration(settings: Settings) -> Any:
    """Return the checkpoint's configuration. Raises UsageError for an unsupported kind of model."""
    require_config(settings.model)
    with reading(settings.model, "model"):
        config = library().AutoConfig.from_pretrained(
            settings.model,
            local_files_only=True,
            trust_remote_code=settings.trust_remote_code,
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"model={settings.model}: {config.model_type} has an encoder and a decoder, and such "
            "models are not supported; use a causal language model, or an encoder for task: "
            "classify"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            f"model={settings.model}: its weights are quantised already; give the checkpoint that "
            "they were made from, with method: qlora"
        )
    _require_kind(settings, config)
    return config


def _require_kind(settings: Settings, config: Any) -> None:
    """Raise UsageError if transformers has no class for this kind of model and the task."""
    if can_do(settings.task, config):
        return
    what = "classifier of texts" if settings.task == "classify" else "language model"
    raise UsageError(
        f"model={settings.model}: transformers has no {what} of the kind {config.model_type}; use "
        f"{task_advice(settings.task, config)}"
    )


def can_do(task: str, config: Any) -> bool:
    """Return whether transformers, or the checkpoint's own code, has a class for the task."""
    kind = _kind(task)
    own = getattr(config, "auto_map", None) or {}
    return type(config) in kind._model_mapping or kind.__name__ in own


def task_advice(task: str, config: Any) -> str:
    """Return advice for a model that can't do a task: another model, or a task that it can do."""
    model = "another model" if task == "classify" else "a causal language model"
    other = "text" if task == "classify" else "classify"
    if can_do(other, config):
        return f"{model}, or task: {other}"
    parts = config.get_text_config() is not config
    return f"{model} of texts only, such as the one that this was made from" if parts else model


def library() -> Any:
    require_offline()
    try:
        from entrenar_py.train.model.libraries import transformers
    except ImportError as error:
        raise UsageError(
            f"entrenar finetune needs {error.name}; {package_data.extra_advice('finetune')}"
        ) from error
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.disable_progress_bar()
    logger = logging.getLogger("transformers")
    logger.handlers[:] = [_HEARING]  # replaces its own handler, which writes to stderr
    return transformers


class _Hearing(logging.Handler):
    """Keeps the warnings of transformers for `notes`."""

    def emit(self, record: logging.LogRecord) -> None:
        told = " ".join(record.getMessage().split())
        if not any(known in told for known in _OWN_WORDS):
            note(f"transformers: {escaping.shortened(told, chars_max=_TOLD_CHARS)}")


_HEARING = _Hearing(logging.WARNING)
_notes = dict[str, None]()  # in order, without duplicates


def note(text: str) -> None:
    """Keep a warning about a checkpoint until `notes` returns it."""
    _notes[text] = None


def notes() -> list[str]:
    """Return the warnings since the last call, from transformers and from this package."""
    found = list(_notes)
    _notes.clear()
    return found


@contextlib.contextmanager
def reading(folder: Path, what: str) -> Iterator[None]:
    """Turn any exception of transformers about files that can't be read into a UsageError."""
    try:
        yield
    except Exception as error:  # transformers may raise any type
        told = escaping.shortened(" ".join(str(error).split()), chars_max=_TOLD_CHARS)
        raise UsageError(f"{folder}: its {what} can't be loaded ({told})") from error
