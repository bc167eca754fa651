"""The text of a script: the line that selects rows by random numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py.observing import call_sites, script_text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ix = torch.randint(len(data) - size, (batch,))\n", "selected.py:1"),
        ("\nrows = random.sample(self.memory, n)\n", "selected.py:2"),
        ("ix = rng.integers(0, n, size=8)\n", "selected.py:1"),
        ("ix = np.random.choice(n, 8)\n", "selected.py:1"),
        ("action = policy.sample()\n", ""),
        ("# ix = torch.randint(n, (8,))\n", ""),
        ("noise = torch.randn(8, 4)\n", ""),
        ("ix = torch.randint(n, (8,))\norder = torch.randperm(n)\n", ""),
        ("ix = torch.randint(n, (8,))\nnp.random.shuffle(files)\n", ""),
        ("ix = torch.randint(n, (8,))\nsampler.set_epoch(1)\n", ""),
    ],
)
def test_the_line_that_selects_rows(
    text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What orders rows at random may go through them once: then no line is said to select."""
    file = tmp_path / "selected.py"
    file.write_text(text)
    module = ModuleType("selected")
    module.__file__ = str(file)
    own = call_sites.is_own
    monkeypatch.setattr(call_sites, "is_own", lambda name: name == str(file) and own(name))
    monkeypatch.setitem(sys.modules, "selected", module)
    monkeypatch.chdir(tmp_path)
    assert script_text.selecting_line() == line
