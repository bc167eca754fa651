"""Arguments that `observe` refuses, each by its name and with what to give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import entrenar_py
from entrenar_py.check.observing import FOLDER
from entrenar_py.check.rank_files import rank_file
from entrenar_py.shared.errors import UsageError

_MODEL = torch.nn.Linear(2, 1)
_LAZY = torch.nn.Sequential(torch.nn.LazyLinear(1))
_OPTIMIZER = torch.optim.SGD(_MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "model=None: give the torch.nn.Module"),
        ({"model": _OPTIMIZER, "optimizer": _MODEL}, "model=a SGD: give the torch.nn.Module"),
        ({"model": _LAZY}, "model: 0.weight gets its shape only in the first pass"),
        ({"optimizer": None}, "optimizer=None: give the torch.optim.Optimizer"),
        ({"optimizer": _MODEL}, "optimizer=a Linear: give the torch.optim.Optimizer"),
        ({"optimizer": []}, r"optimizer=\[\]: give the torch.optim.Optimizer"),
        ({"step": -3}, "step=-3: give a number of steps, 0 or more"),
        ({"step": "3"}, "step='3': give a number of steps, 0 or more"),
    ],
)
@pytest.mark.parametrize("every", [None, 2])
def test_what_is_refused(
    changed: dict[str, Any],
    message: str,
    every: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invalid arguments are refused by the harness's observer and by the watch."""
    if every is None:
        monkeypatch.setenv(FOLDER, str(tmp_path))
    elif changed == {"optimizer": []}:
        message = "the watch follows one optimizer"
    told = {"model": _MODEL, "optimizer": _OPTIMIZER, **changed}
    with pytest.raises(UsageError, match=message):
        entrenar_py.observe(told.pop("model"), told.pop("optimizer"), every=every, **told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"every": 1.5}, "every=1.5: give a number of steps, 1 or more"),
        ({"every": "10"}, "every='10': give a number of steps, 1 or more"),
        ({"every": 1, "patience": 0}, "patience=0: give a number of steps, 1 or more"),
        ({"every": 1, "on_finding": 3}, "on_finding=3: give a function"),
    ],
)
def test_what_the_watch_refuses(changed: dict[str, Any], message: str) -> None:
    """The watch refuses invalid arguments before the first step."""
    with pytest.raises(UsageError, match=message):
        entrenar_py.observe(_MODEL, _OPTIMIZER, **changed)


@pytest.mark.usefixtures("folder")
def test_what_draws_no_samples() -> None:
    """An object that can't be iterated is refused as sampler."""
    with pytest.raises(UsageError, match="sampler=7: give the DataLoader"):
        entrenar_py.observe(_MODEL, _OPTIMIZER, sampler=7)


def test_what_is_told_after_the_end(folder: Path) -> None:
    """Reports after `close` are ignored without an error; `step` may be one of numpy's integers."""
    observation = entrenar_py.observe(_MODEL, _OPTIMIZER, step=np.int64(3))  # type: ignore[arg-type]
    observation.close()
    observation.halted("too late")
    observation.close()
    (file,) = folder.glob("*.jsonl")
    found = rank_file.load(file)
    assert (found.ended, found.problem, found.events) == (True, "", ())


@pytest.mark.usefixtures("folder")
def test_an_optimizer_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer of other parameters is only warned of, as the script may intend it."""
    entrenar_py.observe(_MODEL, _OPTIMIZER).close()
    assert not caplog.records
    stranger = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    entrenar_py.observe(_MODEL, [_OPTIMIZER, stranger]).close()
    (told,) = caplog.messages
    assert "SGD steps no parameter of the model" in told
