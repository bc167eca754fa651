"""Files of the package: contracts, counterexamples, and the extras of pyproject.toml.

The files are inside an installed package, or at the top of a checkout. Extras are the libraries
that only some commands need.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from entrenar_py.shared.errors import UsageError, did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
# Each contract finds bugs that the other misses: a forgotten set_epoch, a sampler that pads.
FOR_SCRIPTS = ("distributed-training-v1.yaml", "training-integrity-v1.yaml")
# Clauses on errors in language models that nobody makes on purpose. If no contract is named, they
# are judged as well, and reported only if they are broken.
OF_LANGUAGE, NEVER_MEANT = "language-model-v1.yaml", ("F-LM-001", "F-LM-002", "F-LM-004")


def contract_path(name: str) -> Path:
    """Return the path of the contract `name`: an existing path, or else a shipped contract.

    A shipped contract may be named without its `.yaml`. Raises UsageError if `name` is neither, is
    a folder, or can't be read.
    """
    path = Path(name)
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long, or a folder without permission to search it
        raise UsageError.of(
            "contract", name, f"{error.strerror}; give a file that can be read"
        ) from error
    if not exists:
        shipped_path = shipped_contract(name)
        if shipped_path is None:
            names = [path.name for path in shipped_contracts()]
            listed = f"shipped are {', '.join(names) or 'none'}"
            raise UsageError(
                f"contract={name!r}: no such file, and no shipped contract of that name; "
                f"{did_you_mean(path.name, names, otherwise=listed)}",
                field="contract",
            )
        return shipped_path
    if path.is_dir():
        raise UsageError.of("contract", name, "is a folder; give one YAML file")
    if not os.access(path, os.R_OK):
        raise UsageError.of("contract", name, "may not be read; check the file's permissions")
    return path


def shipped_contract(name: str) -> Path | None:
    """Return the shipped contract called `name`, with or without `.yaml`; None if there is none."""
    for path in shipped_contracts():
        if name in (path.name, path.stem):
            return path
    return None


def shipped_contracts() -> list[Path]:
    """Return the paths of all contracts that come with the package, sorted by name."""
    folder = _folder("contracts")
    return [] if folder is None else sorted(folder.glob("*.yaml"))


def bindings(stem: str) -> Path | None:
    """Return the path of the shipped bindings for contracts called `stem`, or None."""
    return next((p for p in all_bindings() if p.name == f"{stem}.bindings.yaml"), None)


def all_bindings() -> list[Path]:
    """Return the paths of all binding files that come with the package, sorted by name."""
    folder = _folder("contracts")
    return [] if folder is None else sorted(folder.glob("bindings/*.bindings.yaml"))


def falsification_folder() -> Path | None:
    """Return the folder of mutants and saved counterexamples; None if it is not installed."""
    return _folder("falsification")


def _folder(name: str) -> Path | None:
    inside, checkout = PACKAGE / name, PACKAGE.parents[1] / name
    if inside.is_dir():
        return inside
    return checkout if PACKAGE.parent.name == "src" and checkout.is_dir() else None


DISTRIBUTION = "entrenar-py"


def extra_requirements(extra: str) -> list[str]:
    """Return the requirements of the extra, such as `tensorboard>=2.18`; [] if it is unknown."""
    from importlib import metadata  # imports the e-mail modules, which `--help` doesn't need

    marked = re.compile(rf"\bextra == ['\"]{re.escape(extra)}['\"]")
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from a source folder without installation
        return []
    pairs = (line.partition(";") for line in lines)
    return [requirement.strip() for requirement, _, marker in pairs if marked.search(marker)]


def extra_advice(extra: str) -> str:
    """Return the command that installs the requirements of the extra.

    The command names the libraries instead of this package, which is not on a package index.
    """
    named = " ".join(f"'{one}'" for one in extra_requirements(extra))
    return f"pip install {named}" if named else f"pip install '.[{extra}]' in the checkout"
