"""The error that is reported for a failed command, out of its launcher's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.command import ending

SCRIPT = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import nosuchmodule
    ^^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'nosuchmodule'
"""
TORCHRUN = """E1122 18:49:26 api.py:1015] failed (exitcode: 1) local_rank: 0 (pid: 1)
Traceback (most recent call last):
  File "torchrun", line 7, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====
Root Cause (first observed failure):
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
ACCELERATE = """Traceback (most recent call last):
  File "launch.py", line 1423, in <module>
subprocess.CalledProcessError: Command '['python', 'train.py']' returned exit status 1.
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (SCRIPT + TORCHRUN, "ModuleNotFoundError: No module named 'nosuchmodule'"),
        (SCRIPT + ACCELERATE, "ModuleNotFoundError: No module named 'nosuchmodule'"),
        (SCRIPT.replace("\n", "\n[rank1]: ") + TORCHRUN, "ModuleNotFoundError: No module named"),
        (SCRIPT + "During handling of this\n" + SCRIPT.replace("such", "thing"), "nothingmodule"),
        ("Traceback (most recent call last):\n  File\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        (TORCHRUN, ""),
        ("step 1\nError: loss: nan\n", ""),
        ("", ""),
    ],
)
def test_the_error_of_the_script(tmp_path: Path, text: str, error: str) -> None:
    """The last error that is not a launcher's is reported, or none if there is no other."""
    path = tmp_path / "output.txt"
    path.write_text(text)
    found = ending.script_error(path)
    assert error in found
    assert bool(found) == bool(error)
    assert ending.script_error(tmp_path / "none") == ""
