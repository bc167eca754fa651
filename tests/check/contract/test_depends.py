"""The contracts that `depends_on` leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.check import contract
from entrenar_py.check.contract import Contract
from entrenar_py.shared.errors import ContractError
from tests.check.contract import known


def _write(folder: Path, name: str, depends_on: str) -> Path:
    path = folder / name
    path.write_text(f"metadata:\n  version: 1\n  references: [r]\n  depends_on: {depends_on}\n")
    return path


def _load(path: Path) -> Contract:
    return contract.load(path, vocabulary=known.OURS)


def _unresolved(loaded: Contract) -> list[str]:
    return [line for line in loaded.notes if "depends_on" in line]


def test_names_paths_and_shipped_contracts_resolve(tmp_path: Path) -> None:
    """A file in the same folder, with or without suffix, a path, and a shipped contract resolve."""
    (tmp_path / "sub").mkdir()
    for name in ("b.yaml", "c.yml", "sub/d.yaml"):
        _write(tmp_path, name, "[]")
    path = _write(tmp_path, "a.yaml", "[b, b.yaml, c, sub/d.yaml, training-integrity-v1]")
    assert _unresolved(_load(path)) == []


def test_one_name_may_stand_without_a_list(tmp_path: Path) -> None:
    """`depends_on: b` is a list of one."""
    _write(tmp_path, "b.yaml", "[]")
    assert _unresolved(_load(_write(tmp_path, "a.yaml", "b"))) == []


def test_what_leads_nowhere_is_a_note_with_its_place(tmp_path: Path) -> None:
    """Missing files, folders, files that aren't contracts, and too long names are notes."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "large.yaml").write_bytes(b" " * (2 << 20))
    names = ["nowhere", "folder", "broken", "large", "x" * 5000]
    path = _write(tmp_path, "a.yaml", f"[{', '.join(names)}]")
    found = _unresolved(_load(path))
    assert len(found) == len(names)
    assert found[0].startswith(
        f"{path}:4:16: note: metadata: depends_on 'nowhere' is neither a contract"
    )


@pytest.mark.parametrize(
    ("files", "chains"),
    [
        ({"a": "[a]"}, ["a -> a"]),
        (
            {"a": "[d, b]", "b": "[c]", "c": "[a]", "d": "[]"},
            ["a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c"],
        ),
        ({"a": "[b]", "b": "[c]", "c": "[d]", "d": "[c]"}, ["c -> d -> c", "d -> c -> d"]),
    ],
)
def test_a_circle_is_an_error_that_names_the_chain(
    tmp_path: Path, files: dict[str, str], chains: list[str]
) -> None:
    """A cycle is found through the contract itself, through others, and among others only."""
    for name, depends_on in files.items():
        _write(tmp_path, f"{name}.yaml", depends_on)
    with pytest.raises(ContractError) as caught:
        _load(tmp_path / "a.yaml")
    (problem,) = caught.value.problems
    assert "depends_on is circular" in problem
    assert any(f": {chain}; remove one" in problem.replace(".yaml", "") for chain in chains)
    assert problem.startswith(f"{tmp_path / 'a.yaml'}:4:")


def test_a_diamond_is_no_circle(tmp_path: Path) -> None:
    """Two paths to one contract are allowed. A dependency's missing dependency isn't reported."""
    for name, depends_on in {"a": "[b, c]", "b": "[d]", "c": "[d, gone]", "d": "[]"}.items():
        _write(tmp_path, f"{name}.yaml", depends_on)
    assert _unresolved(_load(tmp_path / "a.yaml")) == []


def test_a_dependency_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    """A mapping can't name a file."""
    with pytest.raises(ContractError, match="depends_on is text or a list of texts"):
        _load(_write(tmp_path, "a.yaml", "[{name: b}]"))


def test_a_dependency_without_metadata_ends_the_chain(tmp_path: Path) -> None:
    """It counts as a contract; its own problems are reported only when it is loaded itself."""
    (tmp_path / "b.yaml").write_text("clauses: []")
    assert _unresolved(_load(_write(tmp_path, "a.yaml", "[b]"))) == []
