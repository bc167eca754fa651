"""Runs published contracts under the bindings that come with the package, and keeps what came out.

    python docs/bound_family.py FOLDER ...      # wherever the contracts are
    python docs/bound_family.py                 # only makes the tables of docs/bindings.md again

What came out is docs/bound-family.json. A result is one of the bindings that it was made under: a
test compares their digests.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from entrenar_py.check import cli
from entrenar_py.check.contract import bindings
from entrenar_py.check.contract.bindings import Entry
from entrenar_py.shared import package_data
from entrenar_py.shared.config.problems import Problems

KEPT = Path(__file__).parent / "bound-family.json"
PAGE = Path(__file__).parent / "bindings.md"
MARKS = ("<!-- generated: family -->\n", "<!-- end -->\n")
AS_BOUND = "as bound"  # on the systems that the bindings name, the reference trainer without them
SYSTEMS = (AS_BOUND, "parameter_server", "mesh", "ring")


def digest(path: Path) -> str:
    """Return the digest of a file of bindings as it is, 32 hex digits."""
    return str(blake3(path.read_bytes()).hexdigest(16))


def stem(path: Path) -> str:
    """The name of the contract that a file of bindings is for."""
    return path.name.removesuffix(".bindings.yaml")


def page(text: str) -> str:
    """The page `text` with today's tables."""
    before, _, rest = text.partition(MARKS[0])
    return f"{before}{MARKS[0]}{tables()}{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def tables() -> str:
    """A table for each file of bindings: what is bound, to which check, and what came out."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    parts = []
    for path in package_data.all_bindings():
        file = bindings.read(path, Problems())
        assert file is not None, path
        lines = kept.get(file.contract, {}).get("lines", {})
        rows = [_row(entry, lines.get(str(entry.position.line), {})) for entry in file.entries]
        tried = sum(bool(entry.check) for entry in file.entries)
        head = f"**`{file.contract}`**: {tried} tried, {len(rows) - tried} not"
        titles = ("statement", "check", *SYSTEMS)
        parts.append("\n".join([head, "", _line(titles), "|---" * len(titles) + "|", *rows]))
    return "\n\n".join(parts) + "\n"


def _row(entry: Entry, results: dict[str, Any]) -> str:
    name = f"{entry.kind} {entry.name}" + (f" ({entry.part})" if entry.part else "")
    if entry.not_tried:
        return _line((name, "none", f"not tried: {entry.not_tried}", "", "", ""))
    return _line((name, f"`{entry.check}`", *(_told(results.get(system)) for system in SYSTEMS)))


def _told(result: Sequence[Any] | None) -> str:
    if result is None:
        return "does not apply"
    verdict, compared = result
    return f"{verdict}, {compared:,}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def run(contract: Path, path: Path) -> dict[str, Any]:
    """Return what every system makes of the bindings in `path`, by line, then by system."""
    lines: dict[str, dict[str, Any]] = {}
    for system in SYSTEMS:
        for line, told in _results(contract, path, system):
            lines.setdefault(line, {})[system] = told
    return {"digest": digest(path), "lines": lines}


def _results(contract: Path, path: Path, system: str) -> Sequence[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "r.json")
        chosen = () if system == AS_BOUND else ("--system", system, "--examples", "0")
        cli.main(
            [
                *("--contract", str(contract), "--no-config", "--json", str(report)),
                "--quiet",
                *chosen,
            ]
        )
        record = json.loads(report.read_text(encoding="utf-8"))
    bound = [one for one in record["results"] if one["binding"] and _is_by(one, path)]
    return [(str(one["binding"]["line"]), [one["verdict"], one["compared"]]) for one in bound]


def _is_by(result: dict[str, Any], path: Path) -> bool:
    return Path(result["binding"]["file"]).name == path.name


def main() -> None:
    """Runs every contract found in the folders that were given."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for path in package_data.all_bindings():
        name = f"{stem(path)}.yaml"
        for contract in (p for folder in sys.argv[1:] for p in Path(folder).rglob(name)):
            if kept.get(stem(path), {}).get("digest") == digest(path):
                continue
            kept[stem(path)] = run(contract, path)
            text = json.dumps(kept, indent=1, sort_keys=True) + "\n"
            KEPT.write_text(text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
