"""Writes what is generated among the docs: `make docs`. Tests hold that it is current."""

from __future__ import annotations

from pathlib import Path

from entrenar_py import kill_matrix, mutants, options

DOCS = Path(__file__).parent


def main() -> None:
    """The command line's reference and the kill matrix."""
    (DOCS / "cli.md").write_text(options.reference(), encoding="utf-8")
    rows = kill_matrix.run(list(mutants.catalogue().values()), kill_matrix.invariants())
    (DOCS / "kill-matrix.md").write_text(kill_matrix.markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
