"""The script of a recipe in a folder of its own: checked out, changed, with data."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from importlib import metadata
from io import BytesIO
from pathlib import Path

from tests.field.recipe import HERE, Edit, Recipe, Trial

CACHE = Path("build/field/clones")


class Unavailable(Exception):
    """A script can't be tried here; says why."""


class Mismatch(Exception):
    """A script isn't as its recipe says."""


def versions(recipe: Recipe) -> dict[str, str]:
    """Return the versions of torch and of what a recipe needs. Raises Unavailable."""
    try:
        return {name: metadata.version(name) for name in ("torch", *recipe.needs)}
    except metadata.PackageNotFoundError as missing:
        raise Unavailable(f"{missing.name} is not installed: pip install {missing.name}") from None


def place(recipe: Recipe, trial: Trial, into: Path, *, clones: Path | None) -> Path:
    """Put the script of a trial, changed as it says, and its data into `into`.

    Returns the folder in which its command runs. Raises Unavailable and Mismatch.
    """
    into.mkdir(parents=True)
    if recipe.repository:
        _check_out(recipe, into, clones)
    if recipe.driver:
        shutil.copy(HERE / "drivers" / recipe.driver, into)
    folder = into / recipe.folder
    for edit in trial.edits:
        change(recipe, edit, folder)
    if trial.configuration:
        (folder / "entrenar-check.toml").write_text(trial.configuration, encoding="utf-8")
    recipe.data(folder)
    return folder


def change(recipe: Recipe, edit: Edit, folder: Path) -> None:
    """Make one change. Raises Mismatch if the line isn't there, or is there more than once."""
    path = folder / edit.file
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    where = [index for index, line in enumerate(lines) if line.strip() == edit.line]
    if len(where) != 1:
        source = f"{recipe.repository or recipe.driver} {recipe.commit[:8]}".strip()
        raise Mismatch(f"{source}: {edit.file} has {len(where)} lines {edit.line!r}, 1 is needed")
    theirs = lines[where[0]]
    indentation = theirs[: len(theirs) - len(theirs.lstrip())]
    ours = [indentation + line for line in (edit.instead or edit.add).splitlines()]
    lines[where[0] : where[0] + 1] = ours if edit.instead else [theirs, *ours]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _check_out(recipe: Recipe, into: Path, clones: Path | None) -> None:
    git_dir = _git_dir(recipe, clones)
    paths = recipe.paths or (recipe.folder,)
    command = ["git", "--git-dir", str(git_dir), "archive", recipe.commit, "--", *paths]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        told = made.stderr.decode(errors="replace").strip()
        raise Unavailable(f"{git_dir} lacks {' '.join(paths)} of {recipe.commit}: {told}")
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(into, filter="data")


def _git_dir(recipe: Recipe, clones: Path | None) -> Path:
    """Return a git directory with the repository; clone it if no folder of clones is given."""
    name = recipe.repository.replace("/", "+")
    if clones is not None:
        found = [clones / name / part for part in (".git", "repo/.git", "repo", ".")]
        for path in found:
            if (path / "HEAD").is_file():
                return path
        raise Unavailable(f"no clone in {clones / name}")
    path = CACHE / name
    if not path.exists():
        address = f"https://github.com/{recipe.repository}"
        command = ["git", "clone", "--quiet", "--bare", address, str(path)]
        if subprocess.run(command, check=False).returncode:
            raise Unavailable(f"{address} could not be cloned: give --clones")
    return path
