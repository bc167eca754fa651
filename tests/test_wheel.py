"""`pip install` brings the package, the contracts and the mutants, nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_contracts_and_mutants(site: Path) -> None:
    """Every YAML and every mutant module at the top of the tree is inside the package.

    Twins are not: only this repository's tests need them.
    """
    for folder in ("contracts", "falsification"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".yaml", ".py"):
                inside = (site / "entrenar_py" / path.relative_to(ROOT)).is_file()
                assert inside != ("twins" in path.parts), path
    tops = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"entrenar_py"}
    assert (site / "entrenar_py" / "py.typed").is_file()


INSTALLED = """
import sys
import entrenar_py.shared.mutants as mutants
from entrenar_py.check import cli

assert str(mutants.__file__).startswith(sys.argv[1])
assert len(mutants.catalogue()) >= 50
sys.exit(cli.main(sys.argv[2:]))
"""


def test_it_runs_from_any_folder(site: Path, tmp_path: Path) -> None:
    """Mutants load, and the installed command finds the contract by name, far from the checkout."""
    told = ["--contract", "distributed-training-v1.yaml", "--only", "F-DP-002", "--examples", "1"]
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED, str(site), *told],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "F-DP-002" in done.stdout
