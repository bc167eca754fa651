"""The error that is reported for a failed command, out of its launcher's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.check.command import run_trace, warm
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.command.run_settings import RunSettings
from entrenar_py.check.rank_files.assembly import LastLives

BOTH = RunSettings(world_size=2, seed=0)
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
PEER = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in step
    loss.backward()
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 630, in backward
RuntimeError: [../gloo/pair.cc] Connection closed by peer
"""
ACCELERATE = """Traceback (most recent call last):
  File "launch.py", line 1423, in <module>
subprocess.CalledProcessError: Command '['python', 'train.py']' returned exit status 1.
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (SCRIPT + TORCHRUN, "ModuleNotFoundError: No module named 'nosuchmodule' (train.py:1)"),
        (SCRIPT + PEER + TORCHRUN, "No module named 'nosuchmodule' (train.py:1)"),
        (PEER + TORCHRUN, "RuntimeError: [../gloo/pair.cc] Connection closed by peer (train.py:9)"),
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
    found = run_trace.script_error(path)
    assert error in found
    assert bool(found) == bool(error)
    assert run_trace.script_error(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("usage: train.py\ntrain.py: error: no --dir\n" + TORCHRUN, "train.py: error: no --dir"),
        ("[rank1]: out of data\n" + TORCHRUN + "left\n", "out of data"),
        (SCRIPT + ACCELERATE, "ModuleNotFoundError: No module named 'nosuchmodule'"),
        (TORCHRUN, ""),
        ("----\n", ""),
    ],
)
def test_the_last_line_of_the_script(tmp_path: Path, text: str, line: str) -> None:
    """What a script printed last is reported, not what its launcher adds."""
    path = tmp_path / "output.txt"
    path.write_text(text)
    assert run_trace.last_printed(path, []) == line
    assert run_trace.last_printed(tmp_path / "none", text.splitlines()) == line or "[rank" in text


@pytest.mark.parametrize(
    ("frame", "loads"),
    [
        ('/site-packages/torch/serialization.py", line 1530, in load', True),
        ('/site-packages/torch/nn/modules/module.py", line 26, in load_state_dict', True),
        ('/site-packages/torch/distributed/checkpoint/state_dict_loader.py", line 5, in run', True),
        ('/site-packages/torch/serialization.py", line 980, in save', False),
    ],
)
def test_an_error_of_loading_a_checkpoint(tmp_path: Path, frame: str, loads: bool) -> None:
    """The frames of the traceback tell, and other ranks' errors don't count."""
    path = tmp_path / "output.txt"
    text = SCRIPT.replace("    import", f'  File "{frame}\n    import')
    path.write_text(text + PEER + TORCHRUN)
    assert run_trace.of_loading(path) == (run_trace.script_error(path) if loads else "")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_script_that_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    """Without one, the reason says what to give."""
    gpus = tmp_path / "nvidiactl"
    if has_gpu:
        gpus.touch()
    monkeypatch.setattr(warm, "GPUS", gpus)
    output = tmp_path / "2-workers/output.txt"
    ended = Ended(code=1, seconds=1.0, tail=(), output=output, num_left=0)
    error = "RuntimeError: Distributed package doesn't have NCCL built in (train.py:84)"
    told = run_trace._last_words(LastLives((), ()), error, ended, BOTH, ())
    assert told == (error if has_gpu else f"{error}; {run_trace._NO_GPU}")
    other = "RuntimeError: a tensor is empty"
    assert run_trace._last_words(LastLives((), ()), other, ended, BOTH, ()) == other


@pytest.mark.parametrize(
    ("world_size", "error", "printed", "needs"),
    [
        (2, "torch.AcceleratorError: CUDA error: invalid device ordinal", "", True),
        (1, "torch.AcceleratorError: CUDA error: invalid device ordinal", "", False),
        (2, "torch.distributed.DistBackendError: NCCL error in: a.cpp", "Duplicate GPU det", True),
        (2, "ValueError: no", "", False),
    ],
)
def test_more_ranks_than_gpus(
    world_size: int,
    error: str,
    printed: str,
    needs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine with one GPU can't run two ranks on GPUs: the reason says what to give."""
    monkeypatch.setattr(warm, "GPUS", tmp_path)
    output = tmp_path / "output.txt"
    output.write_text(f"{error}\nLast error:\n{printed}ected : rank 1 and rank 0\n")
    ended = Ended(code=1, seconds=1.0, tail=(), output=output, num_left=0)
    settings = RunSettings(world_size=world_size, seed=0)
    told = run_trace._last_words(LastLives((), ()), error, ended, settings, ())
    advice = "; 2 ranks need 2 GPUs: --world-size 1, or the script's options for CPUs"
    assert told == error + (advice if needs else "")


@pytest.mark.parametrize(
    ("command", "error", "started"),
    [
        ("python train.py --lr 1", "KeyError: 'RANK' (train.py:3)", "train.py --lr 1"),
        ("env A=1 python -m pkg.train", "KeyError: 'LOCAL_RANK'", "-m pkg.train"),
        ("python t.py", "ValueError: environment variable WORLD_SIZE expected, but not", "t.py"),
        ("python t.py", "KeyError: 'RANKS'", ""),
        ("mpirun -n {world_size} python t.py", "KeyError: 'RANK'", ""),
    ],
)
def test_a_script_that_needs_a_launcher(
    command: str, error: str, started: str, tmp_path: Path
) -> None:
    """It asks for what torchrun would set: the reason has the command that sets it."""
    output = tmp_path / "output.txt"
    ended = Ended(code=1, seconds=1.0, tail=(), output=output, num_left=0)
    alone = RunSettings(world_size=1, seed=0)
    told = run_trace._last_words(LastLives((), ()), error, ended, alone, command.split())
    advice = f"; start it by torchrun: entrenar-check -- torchrun --nproc_per_node=2 {started}"
    assert told == error + (advice if started else "")
