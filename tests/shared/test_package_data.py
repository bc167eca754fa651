"""The places of shipped files, in a checkout and in an installed package."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError

NAMES = [
    "distillation-v1.yaml",
    "distributed-training-v1.yaml",
    "elastic-v1.yaml",
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
    assert [path.name for path in package_data.shipped_contracts()] == NAMES
    for name in (*NAMES, "training-integrity-v1"):
        assert package_data.contract_path(name).is_file()


def test_a_path_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the current folder takes precedence over a shipped one of its name."""
    monkeypatch.chdir(tmp_path)
    Path(NAMES[0]).write_text("mine: 1")
    assert package_data.contract_path(NAMES[0]).resolve() == tmp_path / NAMES[0]


def test_an_unknown_name_lists_what_is_shipped() -> None:
    """The message for an unknown name lists the shipped contracts."""
    with pytest.raises(UsageError, match=r"contract='no-v1': no such file.*training-integrity-v1"):
        package_data.contract_path("no-v1")


@pytest.mark.parametrize(
    ("name", "message"),
    [(".", "is a folder; give one YAML file"), ("x" * 5000, "give a file that can be read")],
)
def test_what_is_no_file_is_refused(name: str, message: str) -> None:
    """A folder, or a name that no file can have, is refused."""
    with pytest.raises(UsageError, match=message):
        package_data.contract_path(name)


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions are checked before anything runs (faked here, as root may read all)."""
    path = tmp_path / "c.yaml"
    path.write_text("a: 1")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="may not be read; check the file's permissions"):
        package_data.contract_path(str(path))


def test_the_falsification_folder_is_found() -> None:
    """A checkout has the folder at the top of the tree."""
    folder = package_data.falsification_folder()
    assert folder is not None
    assert folder.name == "falsification"


def test_an_installed_package_holds_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are looked up inside the package, and next to it only in a checkout."""
    installed, checkout = tmp_path / "site" / "entrenar_py", tmp_path / "src" / "entrenar_py"
    for folder in (installed, checkout, tmp_path / "contracts"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(package_data, "PACKAGE", installed)
    assert package_data.shipped_contracts() == []
    assert package_data.falsification_folder() is None
    with pytest.raises(UsageError, match="shipped are none"):
        package_data.contract_path("any")
    (installed / "contracts").mkdir()
    (installed / "contracts" / "inside.yaml").touch()
    assert [path.name for path in package_data.shipped_contracts()] == ["inside.yaml"]
    monkeypatch.setattr(package_data, "PACKAGE", checkout)
    (tmp_path / "contracts" / "top.yaml").touch()
    assert [path.name for path in package_data.shipped_contracts()] == ["top.yaml"]


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ADVICE = re.compile(r"package_data\.extra_advice\(['\"](\w+)['\"]\)")
OF_THIS_PACKAGE = re.compile(r"pip install [^\n`]*\bentrenar[-_]py\[")
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_advice_is_what_the_project_requires() -> None:
    """Each message names an extra that there is, and the command installs all of it."""
    named = {extra for path in SOURCES for extra in ADVICE.findall(path.read_text("utf-8"))}
    assert named == {"cudnn", "finetune", "integrations", "tensorboard", "wgpu"}
    for extra in named:
        pip, install, *words = shlex.split(package_data.extra_advice(extra))
        assert (pip, install) == ("pip", "install")
        required = PROJECT["optional-dependencies"][extra]
        assert sorted(map(str, map(Requirement, words))) == sorted(
            map(str, map(Requirement, required))
        )


def test_nobody_is_sent_to_an_index_for_this_package() -> None:
    """It is on none; in its checkout `.[extra]` installs an extra."""
    pages = [ROOT / "README.md", ROOT / "action.yml", *(ROOT / "docs").rglob("*.md")]
    for path in (*SOURCES, *pages):
        assert not OF_THIS_PACKAGE.search(path.read_text("utf-8")), path


def test_without_metadata_the_checkout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert package_data.extra_advice("wgpu") == "pip install '.[wgpu]' in the checkout"
