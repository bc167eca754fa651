"""The places of shipped files, in a checkout and in an installed package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrenar_py.shared import shipped
from entrenar_py.shared.errors import UsageError

NAMES = [
    "distillation-v1.yaml",
    "distributed-training-v1.yaml",
    "finetune-v1.yaml",
    "language-model-v1.yaml",
    "layer-pipeline-v1.yaml",
    "local-sgd-v1.yaml",
    "parallelism-v1.yaml",
    "reduction-v1.yaml",
    "training-integrity-v1.yaml",
    "wgpu-backend-v1.yaml",
    "wire-protocol-v1.yaml",
]


def test_the_shipped_contracts_are_found_by_name_and_stem() -> None:
    """Both contracts are found from any folder."""
    assert [path.name for path in shipped.shipped_contracts()] == NAMES
    for name in (*NAMES, "training-integrity-v1"):
        assert shipped.contract_path(name).is_file()


def test_a_path_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the current folder takes precedence over a shipped one of its name."""
    monkeypatch.chdir(tmp_path)
    Path(NAMES[0]).write_text("mine: 1")
    assert shipped.contract_path(NAMES[0]).resolve() == tmp_path / NAMES[0]


def test_an_unknown_name_lists_what_is_shipped() -> None:
    """The message for an unknown name lists the shipped contracts."""
    with pytest.raises(UsageError, match=r"contract='no-v1': no such file.*training-integrity-v1"):
        shipped.contract_path("no-v1")


@pytest.mark.parametrize(
    ("name", "message"),
    [(".", "is a folder; give one YAML file"), ("x" * 5000, "give a file that can be read")],
)
def test_what_is_no_file_is_refused(name: str, message: str) -> None:
    """A folder, or a name that no file can have, is refused."""
    with pytest.raises(UsageError, match=message):
        shipped.contract_path(name)


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions are checked before anything runs (faked here, as root may read all)."""
    path = tmp_path / "c.yaml"
    path.write_text("a: 1")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="may not be read; check the file's permissions"):
        shipped.contract_path(str(path))


def test_the_falsification_folder_is_found() -> None:
    """A checkout has the folder at the top of the tree."""
    folder = shipped.falsification_folder()
    assert folder is not None
    assert folder.name == "falsification"


def test_an_installed_package_holds_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are looked up inside the package, and next to it only in a checkout."""
    installed, checkout = tmp_path / "site" / "entrenar_py", tmp_path / "src" / "entrenar_py"
    for folder in (installed, checkout, tmp_path / "contracts"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(shipped, "PACKAGE", installed)
    assert shipped.shipped_contracts() == []
    assert shipped.falsification_folder() is None
    with pytest.raises(UsageError, match="shipped are none"):
        shipped.contract_path("any")
    (installed / "contracts").mkdir()
    (installed / "contracts" / "inside.yaml").touch()
    assert [path.name for path in shipped.shipped_contracts()] == ["inside.yaml"]
    monkeypatch.setattr(shipped, "PACKAGE", checkout)
    (tmp_path / "contracts" / "top.yaml").touch()
    assert [path.name for path in shipped.shipped_contracts()] == ["top.yaml"]
