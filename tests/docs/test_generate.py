"""What is generated among the docs is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py import kill_matrix
from entrenar_py.kill_matrix import Row

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The script as a module, from its file."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_docs_changes_nothing(
    generate: ModuleType, matrix: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script writes today stands in docs/ already: say `make docs` if it does not."""
    monkeypatch.setattr(kill_matrix, "run", lambda variants, invariants: matrix)
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    generate.main()
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["cli.md", "kill-matrix.md"]
    for name in written:
        assert (tmp_path / name).read_text("utf-8") == (DOCS / name).read_text("utf-8"), name
