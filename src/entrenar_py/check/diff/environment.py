"""What surrounds a training run: its command, files, versions and variables, compared as texts."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from itertools import islice
from pathlib import Path

from blake3 import blake3

from entrenar_py.shared.untrusted import files

_PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "peft", "trl", "datasets", "tokenizers"),
    *("lightning", "deepspeed", "flash-attn", "triton", "bitsandbytes", "torchvision", "timm"),
)
# Beginnings of names. Not "HF_" or "NVIDIA_": some of those hold what opens an account.
_VARIABLES = (
    *("CUDA_", "CUBLAS_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "NVIDIA_TF32"),
    *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_"),
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASS")  # in the name of a variable that is left out
_SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")
_SKIPPED = ("node_modules", "site-packages", "__pycache__")
_FILES_MAX, _FILE_BYTES_MAX = 500, 2**20

STORED = "diff.json"  # in the folder of a stored side
Environment = Mapping[str, str]


def of(command: Sequence[str], folder: Path) -> dict[str, str]:
    """Return by name what surrounds a command in a folder, before it runs."""
    known = {
        "command": shlex.join(command),
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "CPUs": str(os.cpu_count()),
    }
    for name in _PACKAGES:
        try:
            known[f"package {name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    variables = {
        name: text
        for name, text in os.environ.items()
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
    }
    known |= {f"variable {name}": text for name, text in sorted(variables.items())}
    for path in islice(_files(folder), _FILES_MAX):
        try:
            digest = blake3(files.read(path, bytes_max=_FILE_BYTES_MAX)).hexdigest(6)
        except OSError:
            continue
        known[f"file {path.relative_to(folder)}"] = digest
    return known


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of code and configuration in a folder, without hidden and stored folders."""
    for parent, inner, names in os.walk(folder):
        if STORED in names:
            inner.clear()
            continue
        inner[:] = sorted(n for n in inner if not n.startswith(".") and n not in _SKIPPED)
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(_SUFFIXES))


def differences(first: Environment, second: Environment) -> dict[str, tuple[str, str]]:
    """Return by name the texts that differ, "" where one has none; the command comes first."""
    names = dict.fromkeys([*first, *second])
    return {
        name: (first.get(name, ""), second.get(name, ""))
        for name in names
        if first.get(name, "") != second.get(name, "")
    }
