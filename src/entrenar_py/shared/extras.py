"""The libraries that only some commands need: pyproject.toml's extras, and how to install them."""

from __future__ import annotations

import re
from importlib import metadata

PACKAGE = "entrenar-py"


def requirements(extra: str) -> list[str]:
    """Return what an extra requires, such as `tensorboard>=2.18`; [] if nothing is installed."""
    marked = re.compile(rf"\bextra == ['\"]{re.escape(extra)}['\"]")
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # run from a folder of its sources
        return []
    pairs = (line.partition(";") for line in lines)
    return [requirement.strip() for requirement, _, marker in pairs if marked.search(marker)]


def advice(extra: str) -> str:
    """Return the command that installs what an extra requires.

    The command names the libraries, not this package, which is on no index.
    """
    named = " ".join(f"'{one}'" for one in requirements(extra))
    return f"pip install {named}" if named else f"pip install '.[{extra}]' in the checkout"
