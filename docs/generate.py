"""Writes what is generated among the docs: `make docs`. Tests hold that it is current."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from entrenar_py import kill_matrix, mutants, options
from entrenar_py.kill_matrix import Row

DOCS = Path(__file__).parent


def pages(rows: Sequence[Row]) -> dict[str, str]:
    """File name -> text: the command line's reference, and the kill matrix of `rows`."""
    return {"cli.md": options.reference(), "kill-matrix.md": kill_matrix.markdown(rows)}


def main() -> None:
    """Runs the whole kill matrix and writes every page."""
    rows = kill_matrix.run(list(mutants.catalogue().values()), kill_matrix.invariants())
    for name, text in pages(rows).items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
