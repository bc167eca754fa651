"""Writes what was trained as stock `peft` and `transformers` read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entrenar_py.errors import UsageError
from entrenar_py.finetune import folder, rows_read, settings_file
from entrenar_py.training.tensors import Array
from entrenar_py.tuning import saving
from entrenar_py.tuning.prepared import Prepared
from entrenar_py.tuning.settings import Settings
from entrenar_py.tuning.workload import Tuned

SETTINGS = "run.json"  # in the output folder: the settings, for later commands
MARKS = ("config.json", "adapter_config.json")  # without them nobody loads the weights
_OWN = (SETTINGS, "state.checkpoint", "ledger.jsonl", "metrics.jsonl")  # of a run
_OTHERS = (*MARKS, "tokenizer.json")
_WEIGHTS = (".safetensors", ".bin")
_ADVICE = "make room or give access, and export it with --resume"


def write(prepared: Prepared, workload: Tuned, tensors: Mapping[str, Array]) -> Path:
    """Write adapters (or the whole model) and tokenizer to the output folder, and return it.

    Adapters are a PEFT folder: adapter_config.json and adapter_model.safetensors. Raises
    SystemFailure if it can't be written; an earlier output is then whole.
    """
    record = settings_file.to_text(settings_file.to_record(prepared.settings))
    output = prepared.settings.output
    with folder.replacing(output, marks=(*MARKS, SETTINGS), advice=_ADVICE) as partial:
        saving.save(workload.module, tensors, prepared.tokenizer, partial)
        (partial / SETTINGS).write_text(record + "\n", encoding="utf-8")
    return output


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
