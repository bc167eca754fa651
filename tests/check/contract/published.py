"""Load every contract in some folders, and report those that fail.

Run it as `python -m tests.check.contract.published`, with checkouts of repositories that publish
contracts: each `*.yaml` below a folder named `contracts` (or below the folder given) is loaded as
`--validate` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from entrenar_py.check import contract
from entrenar_py.shared.errors import ContractError
from tests.check.contract import known


def main(folders: Sequence[str]) -> int:
    """Print the errors of each contract that does not load, and how many load. Return 1 if some
    fail.
    """
    paths = sorted({path for folder in folders for path in _contracts(Path(folder))})
    refused = 0
    for path in paths:
        try:
            contract.load(path, vocabulary=known.OURS)
        except ContractError as error:
            refused += 1
            print(error)
    print(f"{len(paths) - refused} of {len(paths)} load")
    return int(refused > 0)


def _contracts(folder: Path) -> Iterator[Path]:
    below = [path for path in folder.rglob("*.yaml") if "contracts" in path.parts[:-1]]
    yield from below or folder.rglob("*.yaml")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
