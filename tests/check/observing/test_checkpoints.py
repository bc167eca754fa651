"""What counts as a checkpoint of a script, and which of its lines may save or load one."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from entrenar_py.check.observing import FOLDER, checkpoints, script_text, torch_calls
from entrenar_py.check.rank_files import notes
from entrenar_py.shared import mutants

MODEL = nn.Linear(16, 4)
STATE = MODEL.state_dict()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run whose process is watched, five steps after its begin."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(checkpoints, "_CURRENT", [])
    for patch in torch_calls.LINE_TABLE:
        owner = __import__(patch.module, fromlist=["_"])
        if not patch.owner:
            monkeypatch.setattr(owner, patch.name, getattr(owner, patch.name))
    files = (torch_calls._saved, torch_calls._loaded)
    saves = [patch for patch in torch_calls.LINE_TABLE if patch.wrap in files]
    torch_calls.apply(saves, torch_calls.EARS)
    checkpoints.watch(MODEL.parameters(), lambda: 5)
    return tmp_path


class Trainer:
    """An object that is pickled as a whole."""

    def __init__(self) -> None:
        self.epoch, self.parts = 3, {"model": MODEL}


@pytest.mark.parametrize(
    "save",
    [
        lambda path: torch.save({"model": STATE, "step": 5}, path / "a.pt"),
        lambda path: torch.save(MODEL, io.BytesIO()),
        lambda path: torch.save({name: one.bfloat16() for name, one in STATE.items()}, path / "a"),
        lambda path: np.savez(path / "a.npz", **{n: one.numpy() for n, one in STATE.items()}),
        lambda path: pickle.dump(Trainer(), io.BytesIO()),
        lambda path: safetensors.torch.save_file(STATE, path / "a.safetensors"),
        lambda path: safetensors.torch.save_model(MODEL, str(path / "a.safetensors")),
    ],
)
def test_weights_are_seen_however_they_are_saved(
    folder: Path, save: Callable[[Path], None]
) -> None:
    """By torch, numpy, pickle or safetensors, in a format of half the bytes, or in an object."""
    save(folder)
    assert notes.saved(folder).after == (5,)


@pytest.mark.parametrize(
    "save",
    [
        lambda path: torch.save({"losses": [0.5] * 100, "step": torch.tensor(3)}, path / "a.pt"),
        lambda path: np.save(path / "a.npy", np.zeros(4, np.float32)),
        lambda path: pickle.dump({"lr": 0.1}, io.BytesIO()),
    ],
)
def test_losses_and_settings_are_no_checkpoint(folder: Path, save: Callable[[Path], None]) -> None:
    """What is saved has less than an eighth of the weights' bytes."""
    save(folder)
    assert notes.saved(folder).after == ()


def test_before_training_nothing_is_a_checkpoint(folder: Path) -> None:
    """Data that is prepared by the same process is as large as weights."""
    checkpoints._CURRENT.clear()
    torch.save(STATE, folder / "data.pt")
    assert notes.saved(folder).after == ()


@pytest.mark.parametrize("given", [Path, str, open])
def test_a_checkpoint_that_is_read_before_training(
    folder: Path, given: Callable[[Path], Any]
) -> None:
    """By its name or as an open file; what is read later is not what training begins with."""
    torch.save(STATE, folder / "a.pt")
    checkpoints._CURRENT.clear()
    file = given(folder / "a.pt") if given is not open else (folder / "a.pt").open("rb")
    torch.load(file)
    if given is open:
        file.close()
    assert notes.saved(folder).read_back.startswith("test_checkpoints.py:")
    (path,) = folder.glob(notes.SAVES)
    checkpoints.watch(MODEL.parameters(), lambda: 0)
    checkpoints.first_step()
    said = path.read_text()
    torch.load(folder / "a.pt")
    assert path.read_text() == said
    assert not checkpoints.was_read()


def test_a_checkpoint_that_is_read_after_a_pass_to_warm_up(folder: Path) -> None:
    """Training begins with the first step, so the script goes on from what it has read until then.

    Which lines run later is told then, too.
    """
    torch.save(STATE, folder / "a.pt")
    assert not notes.saved(folder).read_back
    torch.load(folder / "a.pt")
    assert notes.saved(folder).read_back.startswith("test_checkpoints.py:")
    assert (checkpoints.was_read(), checkpoints.was_read()) == (True, False)
    (path,) = folder.glob(notes.SAVES)
    assert "loads_late" not in path.read_text()
    checkpoints.first_step()
    checkpoints.first_step()
    assert path.read_text().count("loads_late") == 1


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("torch.save(state, path)", "train.py:2"),
        ("model.save_pretrained(path)", "train.py:2"),
        ("array.tofile(path)", "train.py:2"),
        ("joblib.dump(model, path)", "train.py:2"),
        ("# torch.save(state, path)", ""),
        ("def save_checkpoint(model):", ""),
        ("json.dump(settings, file)", ""),
        ("plt.savefig(path)", ""),
        ("np.savetxt(path, losses)", ""),
        ("ctx.save_for_backward(x)", ""),
        ("self.save_hyperparameters()", ""),
    ],
)
def test_a_line_that_saves(line: str, first: str) -> None:
    """The first line of a script that calls a function to save tensors, where there is one."""
    assert script_text.first(checkpoints._SAVES, {"/a/train.py": f"import x\n{line}\n"}) == first


@pytest.mark.parametrize(
    ("body", "first"),
    [
        ("kept = copy.deepcopy(net)", ""),
        ("torch.save(net, path)", "train.py:2"),
        ("super().save_state(path)", "train.py:2"),
        ("open(path, 'wb').write(data)", "train.py:3"),
    ],
)
def test_a_function_of_the_script_saves_what_its_body_saves(body: str, first: str) -> None:
    """Averaged weights that are put in for a save are none, if nothing is written after that."""
    text = {"train.py": f"def save_state(net):\n    {body}\nsave_state(net)\n"}
    own = checkpoints._own_functions(text)
    assert script_text.first(checkpoints._SAVES, text, own) == first


@pytest.mark.parametrize(
    ("line", "loads"),
    [
        ("accelerator.load_state(path)", True),
        ("average.load_state_dict(model.state_dict())", False),
        ("state = torch.load(path)", True),
        ('cli.add_argument("--resume")', True),
        ("config = json.load(file)", False),
        ("data = load_dataset(name)", False),
    ],
)
def test_a_line_that_loads(line: str, loads: bool) -> None:
    """What is loaded for other reasons than to go on is left out, as far as it shows."""
    assert bool(script_text.first(checkpoints._LOADS, {"train.py": line})) is loads


@pytest.mark.parametrize(
    ("lines", "option"),
    [
        ('cli.add_argument("--resume", type=str, help="a path (or none)")', "--resume PATH"),
        ('cli.add_argument("--resume", action="store_true")', "--resume"),
        ("@click.option('--resume', is_flag=True)", "--resume"),
        (
            'add("--load-data")\nadd("--resume-from-checkpoint", type=str)',
            "--resume-from-checkpoint PATH",
        ),
        ('add("--no-resume", action="store_true")\nadd("--ckpt")', "--ckpt PATH"),
        ("resume = True", ""),
        ('start = os.environ.get("START", "new")\nif start == "resume":', "START=resume"),
        ('start: str = os.getenv("START")\nif "resume" in x or start == "resume":', "START=resume"),
        ('add("--init-from")\nif args.init_from == "resume":', "--init-from=resume"),
        ("mode = 'new'\nexec(open('conf.py').read())\nif mode == 'resume':", "--mode=resume"),
        ("mode = 'new'\nif mode == 'resume':", ""),
        ('path = os.environ.get("RESUME_FROM")', "RESUME_FROM=PATH"),
        ('if int(os.environ.get("RESUME", 0)):', "RESUME=1"),
        ('if os.environ["RESUME"] == "1":', "RESUME=1"),
        ('add("--load-data")\nos.getenv("RESUME")', "RESUME=PATH"),
    ],
)
def test_the_option_that_resumes(lines: str, option: str) -> None:
    """One that sounds most like a resume, with the path that it takes."""
    assert checkpoints._option({"train.py": lines}) == option


@pytest.mark.parametrize(("folder", "is_own"), [("here", True), ("elsewhere", False)])
def test_modules_that_a_machine_adds_are_not_the_scripts(
    folder: str, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a start file of the machine imports loads no checkpoint of the script."""
    file = tmp_path / folder / "helping.py"
    file.parent.mkdir()
    file.write_text("state = torch.load(path)\n")
    module = types.ModuleType("helping")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "helping", module)
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    assert (str(file) in script_text.texts()[0]) is is_own


def test_planted_bugs_are_no_part_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that may plant one has loaded them all, in the folder of a checkout."""
    monkeypatch.chdir(tmp_path)
    names = "script_loaded", f"{mutants.PACKAGE}.loss"
    files = [tmp_path / f"{name}.py" for name in names]
    for name, file in zip(names, files, strict=True):
        file.write_text("resume = False\n", "utf-8")
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    own, _ = script_text.texts()
    assert [str(file) in own for file in files] == [True, False]


STEPPED = {"model": STATE, "optimizer": torch.ones(90)}


@pytest.mark.parametrize(
    ("files", "newest"),
    [
        ({"a.pt": STEPPED}, "a.pt"),
        ({"a.pt": STATE, "b.pt": STATE}, ""),
        ({"last.pt": STEPPED, "model.pt": STATE}, "last.pt"),
        ({"4/model.pt": STATE, "4/optimizer.pt": {"moments": torch.ones(130)}}, "4"),
    ],
)
def test_what_a_script_is_given_to_go_on(folder: Path, files: dict[str, Any], newest: str) -> None:
    """The file with the weights and more, the only file, or the folder of several."""
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        torch.save(values, folder / name)
    assert notes.newest_checkpoint(folder) == folder / newest


def test_ranks_with_files_of_their_own(folder: Path) -> None:
    """Which of them a script goes on from is not known."""
    for rank in range(2):
        torch.save(STEPPED, folder / f"{rank}.pt")
        notes.write_save(folder, after=5, path=str(folder / f"{rank}.pt"))
        own = folder / notes.SAVES.replace("*", str(os.getpid()))
        own.rename(folder / notes.SAVES.replace("*", f"{rank}-of-2"))
    assert notes.newest_checkpoint(folder) is None


def test_tensors_without_a_place_are_saved_all_the_same(folder: Path) -> None:
    """A sparse tensor has no pointer, and a script that saves one goes on."""
    torch.save({"model": STATE, "graph": torch.eye(9).to_sparse()}, folder / "a.pt")
    assert notes.newest_checkpoint(folder) == folder / "a.pt"
