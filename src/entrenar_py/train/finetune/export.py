"""Writes what was trained as stock `peft` and `transformers` read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from blake3 import blake3

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.finetune import folder, package, rows_read, settings_file
from entrenar_py.train.model import saving, stock, trust
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.model.workload import Tuned

SETTINGS = "run.json"  # in the output folder: the settings, for later commands
DIGESTS = "digests"  # in it, beside the settings: of what the run's model and tokenizer were
MARKS = ("config.json", "adapter_config.json")  # without them nobody loads the weights
_OWN = (SETTINGS, "state.checkpoint", "ledger.jsonl", "metrics.jsonl")  # of a run
_OTHERS = (*MARKS, "tokenizer.json")
_WEIGHTS = (".safetensors", ".bin")
_TEMPLATES = "additional_chat_templates"
_ADVICE = "make room or give access, and export it with --resume"


@dataclass(frozen=True)
class Digests:
    """Digests, by content, of what a run was made of: 32 hex digits each."""

    model: str
    tokenizer: str


def write(
    prepared: Prepared, workload: Tuned, tensors: Mapping[str, Array], *, model_digest: str
) -> Path:
    """Write adapters (or the whole model) and tokenizer to the output folder, and return it.

    Adapters are a PEFT folder: adapter_config.json and adapter_model.safetensors. The checkpoint
    had `model_digest` when it was loaded. Raises SystemFailure if it can't be written; an earlier
    output is then whole. Raises it, too, if stock libraries don't read what was trained; the files
    are then kept.
    """
    record = settings_file.to_record(prepared.settings)
    output = prepared.settings.output
    with folder.replacing(output, marks=(*MARKS, SETTINGS), advice=_ADVICE) as partial:
        saving.save(workload.module, tensors, prepared.tokenizer, partial)
        record[DIGESTS] = asdict(Digests(model_digest, tokenizer_digest(partial)))
        text = settings_file.to_text(record)
        (partial / SETTINGS).write_text(text + "\n", encoding="utf-8")
    settings, pad_token = prepared.settings, prepared.pad_token
    stock.require_agreement(settings, workload.module, tensors, pad_token=pad_token, folder=output)
    rows_read.say_warnings()
    return output


def read(output: Path) -> tuple[Settings, Digests | None]:
    """Return what `write` noted of a run, None for digests of a release that had none.

    Raises UsageError or ContractError for anything that it did not write.
    """
    path = output / SETTINGS
    record = dict(trust.record(path, str(output)))
    noted = record.pop(DIGESTS, None)
    settings = settings_file.of_text(settings_file.to_text(record), str(path))
    if noted is None:
        return settings, None
    names = sorted(field.name for field in fields(Digests))
    is_whole = isinstance(noted, dict) and sorted(noted) == names
    if not is_whole or not all(isinstance(one, str) for one in noted.values()):
        raise UsageError(
            f"{path}: {DIGESTS}={escaping.shortened(repr(noted))}: use {', '.join(names)}, a text "
            "each, as the run wrote them"
        )
    return settings, Digests(**noted)


def tokenizer_digest(folder: Path) -> str:
    """Return 32 hex digits over all files in `folder` that decide what its tokenizer does.

    These are its words, its special tokens and its chat templates. Files, and not what a library
    makes of them: a later release may show that differently.
    """
    hasher = blake3()
    places = [folder / name for name in package.TOKENIZER]
    places += (folder / _TEMPLATES).rglob("*")
    for path in sorted(place for place in places if place.is_file()):
        content = blake3(path.read_bytes()).digest()
        hasher.update(str(path.relative_to(folder)).encode() + b"\0" + content)
    return hasher.hexdigest(16)


def require_own(settings: Settings) -> None:
    """Raise UsageError if the output folder has files of others, which an export would replace.

    These are the checkpoint that is trained, and any other one that no run has written.
    """
    output = settings.output
    told = f"output={output}: it has a checkpoint that no run has written"
    if output.resolve() == settings.model.resolve():
        told = f"output={output}: it is the model's folder, whose files would be replaced"
    elif any((output / name).exists() for name in _OWN) or not any(
        path.name in _OTHERS or path.suffix in _WEIGHTS for path in _listed(output)
    ):
        return
    raise UsageError(f"{told}; give another folder")


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # none yet, or told when it is made
        return []


def make_folder(prepared: Prepared) -> Path:
    """Make the output folder, with a list of the rows that were skipped, and return it.

    Raises UsageError if that can't be done.
    """
    output = prepared.settings.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output={output}: can't be made ({error.strerror})") from error
    rows_read.keep_skipped(prepared)
    return output
