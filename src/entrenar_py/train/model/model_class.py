"""The class of transformers that makes a checkpoint's model, and the reading of its files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from entrenar_py.shared import shipped
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.model import fitting, trust
from entrenar_py.train.model.settings import Settings

_TOLD_CHARS = 300
# Of warnings that need not be repeated: weights that are missing, unknown or of another shape
# (`fitting`), rows that are too long (`data.max_tokens`), and how a checkpoint would draw tokens,
# since answers are the likeliest ones.
_OWN_WORDS = (
    "LOAD REPORT",
    "Token indices sequence length is longer than",
    "generation flags are not valid",
)


def of(settings: Settings) -> tuple[Any, dict[str, Any]]:
    """Return the class of transformers that makes the model, and what it adds to config.json."""
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


def shortened(kind: Any, config: Any, shorten: Callable[[nn.Module], None], *, unties: bool) -> Any:
    """Return the class of models with `config`, whose constructor calls `shorten` at its end."""
    whole: Any = kind._model_mapping[type(config)]

    def made(self: Any, config: Any, *given: Any, **named: Any) -> None:
        if unties:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        whole.__init__(self, config, *given, **named)
        shorten(self)

    names = {"__init__": made, "__module__": whole.__module__, "__qualname__": whole.__qualname__}
    found: Any = type(whole.__name__, (whole,), names)

    def from_config(config: Any, *, dtype: Any = None, trust_remote_code: bool = False) -> Any:
        """Make a model from a configuration, as an Auto class does."""
        assert not trust_remote_code, "such a model has no class to shorten"
        return found._from_config(config, dtype=dtype)

    found.from_config = from_config
    return found


def configuration(settings: Settings) -> Any:
    """Return the checkpoint's configuration. Raises UsageError for a model of another kind."""
    fitting.require_config(settings.model)
    with reading(settings.model, "model"):
        config = library().AutoConfig.from_pretrained(
            settings.model,
            local_files_only=True,
            trust_remote_code=settings.trust_remote_code,
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"model={settings.model}: {config.model_type} has an encoder and a decoder, which is "
            "not trained here; use a causal language model, or an encoder for task: classify"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            f"model={settings.model}: its weights are quantised already; give the checkpoint that "
            "they were made from, with method: qlora"
        )
    _require_kind(settings, config)
    return config


def _require_kind(settings: Settings, config: Any) -> None:
    """Raise UsageError if transformers has no class for models like this and the task."""
    if can_do(settings.task, config):
        return
    what = "classifier of texts" if settings.task == "classify" else "language model"
    raise UsageError(
        f"model={settings.model}: transformers has no {what} of the kind {config.model_type}; use "
        f"{advice(settings.task, config)}"
    )


def can_do(task: str, config: Any) -> bool:
    """Return whether transformers, or the checkpoint's own code, has a class for the task."""
    kind = _kind(task)
    own = getattr(config, "auto_map", None) or {}
    return type(config) in kind._model_mapping or kind.__name__ in own


def advice(task: str, config: Any) -> str:
    """Return what to use where a model can't do a task: another one, or a task that it can do."""
    model = "another model" if task == "classify" else "a causal language model"
    other = "text" if task == "classify" else "classify"
    if can_do(other, config):
        return f"{model}, or task: {other}"
    parts = config.get_text_config() is not config
    return f"{model} of texts alone, such as the one that this was made from" if parts else model


def library() -> Any:
    trust.require_offline()
    try:
        import peft  # noqa: F401
        import transformers
    except ImportError as error:
        raise UsageError(
            f"entrenar finetune needs {error.name}; {shipped.extra_advice('finetune')}"
        ) from error
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.disable_progress_bar()
    logger = logging.getLogger("transformers")
    logger.handlers[:] = [_HEARING]  # in place of its own, which writes where it likes
    return transformers


class _Hearing(logging.Handler):
    """Keeps what transformers warns of, for `notes`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, unless this package says the same in its own words."""
        told = " ".join(record.getMessage().split())
        if not any(known in told for known in _OWN_WORDS):
            note(f"transformers: {escaping.shortened(told, chars_max=_TOLD_CHARS)}")


_HEARING = _Hearing(logging.WARNING)
_notes = dict[str, None]()  # in order, each once


def note(text: str) -> None:
    """Keep what is worth a warning about a checkpoint, until somebody takes it by `notes`."""
    _notes[text] = None


def notes() -> list[str]:
    """Return the warnings since the last call, of transformers and of this package."""
    found = list(_notes)
    _notes.clear()
    return found


@contextlib.contextmanager
def reading(folder: Path, what: str) -> Iterator[None]:
    """Turn what transformers raises for files that can't be read into a UsageError."""
    try:
        yield
    except Exception as error:  # it raises what it likes
        told = escaping.shortened(" ".join(str(error).split()), chars_max=_TOLD_CHARS)
        raise UsageError(f"{folder}: its {what} can't be loaded ({told})") from error
