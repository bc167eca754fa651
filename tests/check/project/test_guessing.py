"""Placeholders are put into a command if names leave no doubt; doubtful options are listed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from entrenar_py.check.project import commands, init
from entrenar_py.shared.errors import UsageError

EXAMPLES = Path(__file__).parents[3] / "examples/user_trainers"
SCRIPT = """
import argparse, entrenar_py
cli = argparse.ArgumentParser()
cli.add_argument("--max-steps", type=int)
cli.add_argument("-o", "--output-dir")
cli.add_argument("--seed", type=int)
cli.add_argument("--epochs", type=int)
cli.add_argument("--max-grad-norm", type=float)
entrenar_py.observe(1, 2)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)


def guess(line: str) -> init.Guess:
    return init.guess_command(line.split(), Path.cwd())


@pytest.mark.parametrize(
    ("line", "made", "world_size"),
    [
        (
            "torchrun --nproc_per_node=2 train.py",
            "torchrun --nproc_per_node={world_size} train.py",
            None,
        ),
        (
            "torchrun --nproc-per-node 4 train.py",
            "torchrun --nproc-per-node {world_size} train.py",
            4,
        ),
        (
            "torchrun --nproc-per-node=gpu train.py",
            "torchrun --nproc-per-node={world_size} train.py",
            None,
        ),
        (
            "torchrun --standalone train.py",
            "torchrun --nproc_per_node={world_size} --standalone train.py",
            None,
        ),
        (
            "accelerate launch train.py",
            "accelerate launch --num_processes={world_size} train.py",
            None,
        ),
        (
            "python -m torch.distributed.run --nproc_per_node=8 train.py",
            "python -m torch.distributed.run --nproc_per_node={world_size} train.py",
            8,
        ),
        ("mpirun -np 2 python train.py", "mpirun -np {world_size} python train.py", None),
        ("mpiexec python train.py", "mpiexec -n {world_size} python train.py", None),
        ("mpirun -n4 python train.py", "mpirun -n{world_size} python train.py", 4),
        (
            "accelerate launch --num-processes 2 train.py",
            "accelerate launch --num-processes {world_size} train.py",
            None,
        ),
        (
            "accelerate-launch --num_processes=4 train.py",
            "accelerate-launch --num_processes={world_size} train.py",
            4,
        ),
        (
            "python -m accelerate.commands.launch --num_processes 2 -m train",
            "python -m accelerate.commands.launch --num_processes {world_size} -m train",
            None,
        ),
        ("srun --ntasks=3 python train.py", "srun --ntasks={world_size} python train.py", 3),
        (
            "srun -N1 torchrun --nproc_per_node=2 train.py",
            "srun -N1 torchrun --nproc_per_node={world_size} train.py",
            None,
        ),
        ("deepspeed --num_gpus 2 train.py", "deepspeed --num_gpus {world_size} train.py", None),
        (
            "uv run torchrun --nproc_per_node=2 train.py",
            "uv run torchrun --nproc_per_node={world_size} train.py",
            None,
        ),
        ("my launch {world_size} train.py", "my launch {world_size} train.py", None),
        ("python train.py --nproc_per_node=2", "python train.py --nproc_per_node=2", None),
    ],
)
def test_workers(line: str, made: str, world_size: int | None) -> None:
    """The launcher's number of workers is replaced; the script's own options are left alone."""
    found = guess(line)
    assert " ".join(found.command).startswith(made)
    assert found.world_size == world_size
    told = any("no launcher was recognised" in one for one in found.look)
    assert told == ("{world_size}" not in made)


def test_a_check_fills_in_what_init_does() -> None:
    """The command after `--` gets {world_size} by the function that `init` uses."""
    line = "OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 train.py --nproc_per_node 3"
    found = commands.of(line.split())
    assert " ".join(found.command) == (
        "env OMP_NUM_THREADS=1 torchrun --nproc_per_node {world_size} train.py --nproc_per_node 3"
    )
    assert found.changes[-1] == "{world_size} stands for the number of workers, instead of 4"
    assert found.world_size == 4
    for untouched in ("./train.sh 2", "torchrun --nproc_per_node={world_size} train.py"):
        assert commands.of(untouched.split()) == commands.Launch(command=(*untouched.split(),))


@pytest.mark.parametrize(
    ("line", "made"),
    [
        (
            "torchrun --nproc_per_node=2 train.py",
            "torchrun --standalone --nproc_per_node=2 train.py",
        ),
        (
            "python -m torch.distributed.run t.py",
            "python -m torch.distributed.run --standalone t.py",
        ),
        ("torchrun train.py --master_port 3", "torchrun --standalone train.py --master_port 3"),
        ("torchrun --standalone train.py", ""),
        ("torchrun --master-port=29501 train.py", ""),
        ("torchrun --rdzv_backend=c10d --nnodes 1 train.py", ""),
        (
            "torchrun --nnodes=1 --node_rank=0 train.py",
            "torchrun --standalone --nnodes=1 --node_rank=0 train.py",
        ),
        (
            "torchrun --nnodes 1:1 t.py --nnodes=2",
            "torchrun --standalone --nnodes 1:1 t.py --nnodes=2",
        ),
        ("torchrun --nnodes=1:2 train.py", ""),
        ("accelerate launch train.py", ""),
        ("bash -c 'torchrun train.py'", ""),
        ("python train.py", ""),
    ],
)
def test_each_run_takes_a_free_port(line: str, made: str) -> None:
    """torchrun's default is one port for all jobs; a place that the user chose is kept."""
    launch = commands.Launch(command=tuple(shlex.split(line)))
    found = commands.apart(launch)
    assert shlex.join(found.command) == (made or line)
    assert found.changes == (("--standalone was added",) if made else ())


def test_options_of_the_script() -> None:
    """Options of the command are replaced, missing ones added, and both are listed, with knobs."""
    found = guess("torchrun --nproc_per_node=2 train.py --output-dir=out --lr 1")
    assert " ".join(found.command[2:]) == (
        "train.py --output-dir={workdir} --lr 1 --max-steps {steps} --seed {seed}"
    )
    told = "\n".join(found.taken)
    assert "{workdir} replaces out in the options of train.py" in told
    assert "--max-steps {steps} was added: train.py has such an option" in told
    (look,) = [one for one in found.look if "train.py" not in one and "program" not in one]
    assert look.startswith("--max-grad-norm {clip} could be tried")


def test_what_is_in_doubt_is_left_alone() -> None:
    """Two options that fit, and a folder that may hold the data, are left alone."""
    text = SCRIPT.replace('"-o", "--output-dir"', '"--dir"').replace('"--seed"', '"--num_steps"')
    Path("train.py").write_text(text.replace("entrenar_py.observe", "print"))
    found = guess("torchrun train.py --dir data")
    assert found.command[-3:] == ["train.py", "--dir", "data"]
    told = "\n".join(found.look)
    assert "{steps} could be any of --max-steps, --num_steps of train.py" in told
    assert "is --dir the folder for checkpoints? then give it {workdir}" in told
    assert "entrenar-check ends each run after 8 steps" in told
    assert "train.py does not call entrenar_py.observe(model, optimizer" in told
    Path("train.py").write_text(text)
    told = "\n".join(guess("torchrun train.py --dir data").look)
    assert "--epochs counts epochs: give it a small number" in told


def test_what_keeps_runs_from_being_compared() -> None:
    """A checkpoint that every run finds, and a batch size per worker, are listed."""
    text = SCRIPT.replace("--output-dir", "--per-device-batch-size") + "torch.save(1, 'last.pt')\n"
    Path("train.py").write_text(text)
    told = "\n".join(guess("torchrun train.py").look)
    assert "train.py saves files, and no option was found for the folder" in told
    assert "--per-device-batch-size: if it is the size for one worker" in told
    assert "saves" not in "\n".join(guess("torchrun train.py --out {workdir}").look)


def test_a_script_that_counts_epochs() -> None:
    """Without an option for steps, epochs are counted; batches are shares of a global one."""
    Path("train.py").write_text(SCRIPT.replace("--max-steps", "--batch-size"))
    found = guess("torchrun train.py --epochs 90")
    assert "--epochs {epochs}" in " ".join(found.command)
    told = "\n".join(found.look)
    assert "a run can be stopped only between epochs" in told
    assert "--batch-size {share:16} divides a global batch of 16 among the workers" in told


@pytest.mark.parametrize(
    ("line", "expects"),
    [
        ("loss.backward()", True),
        ("clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)", False),
        ("if not torch.isfinite(loss): raise SystemExit(1)", False),
        ("scaler = torch.amp.GradScaler()", False),
    ],
)
def test_a_script_without_a_test_for_nan(line: str, expects: bool) -> None:
    """A likely falsification is told before anything runs, with a line that prevents it."""
    Path("train.py").write_text(f"{SCRIPT}{line}\n")
    told = "\n".join(guess("torchrun train.py").look)
    assert ("train.py shows no test for NaN" in told) is expects


def test_no_script() -> None:
    """For a module elsewhere, or a file that isn't Python, nothing is guessed."""
    Path("broken.py").write_text("print 1")
    for line, told in (
        ("torchrun -m trl.sft", "no local script (*.py)"),
        ("torchrun broken.py", "broken"),
    ):
        assert any(one.startswith(told) for one in guess(line).look)
    found = guess("no-such-program train.py")
    assert found.look[0] == "there is no program 'no-such-program' here: nothing can be run yet"


@pytest.mark.parametrize("module", ["pkg.train", "pkg"])
def test_a_module(module: str) -> None:
    """A module is found as Python finds it from the command's folder."""
    place = Path("pkg", "train.py" if module == "pkg.train" else "__main__.py")
    place.parent.mkdir()
    place.write_text(SCRIPT)
    found = guess(f"torchrun --nproc_per_node=2 -m {module} --seed 3")
    assert found.command[3:7] == [module, "--seed", "{seed}", "--max-steps"]


def test_options_that_argparse_does_not_know() -> None:
    """Options that a script parses by itself are recognised if the command gives them."""
    Path("train.py").write_text("import sys, entrenar_py\nentrenar_py.observe(1, 2)\n")
    found = guess("torchrun train.py config.py --max_iters=20 --out_dir out --compile=False")
    assert found.command[-5:] == [
        *("config.py", "--max_iters={steps}", "--out_dir", "{workdir}"),
        "--compile=False",
    ]


def test_as_typed_in_a_shell() -> None:
    """A variable in front or one quoted text is accepted; the text of `sh -c` is not changed."""
    assert guess("OMP_NUM_THREADS=1 torchrun train.py").command[:3] == [
        *("env", "OMP_NUM_THREADS=1", "torchrun")
    ]
    line = "torchrun --nproc_per_node=2 train.py --name 'two words'"
    found = init.guess_command([line], Path.cwd())
    assert found.command[:5] == [
        *("torchrun", "--nproc_per_node={world_size}", "train.py", "--name", "two words")
    ]
    shell = ["bash", "-lc", "cd x && torchrun --nproc_per_node=2 train.py"]
    found = init.guess_command(shell, Path.cwd())
    assert found.command == shell
    assert found.look == [
        "init does not read the text for bash: put {world_size}, {steps}, {workdir} and {seed} "
        "into it, or give init the command alone, without bash"
    ]


def test_several_machines() -> None:
    """For several machines, the advice is to start on one."""
    told = guess("torchrun --nnodes=2 --nproc_per_node=4 train.py").look
    assert any(one.startswith("2 machines: ") for one in told)
    told = guess("torchrun --nnodes=1 --nproc_per_node=4 train.py").look
    assert not any("machines" in one for one in told)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_examples_are_observed(path: Path) -> None:
    """Every example is recognised as observed, by `observe` or by a callback."""
    found = commands.read_script(path)
    assert found is not None
    assert found.is_observed


def test_a_script_that_only_looks_like_it() -> None:
    """Another library's `observe`, or a comment, doesn't count."""
    Path("other.py").write_text("import rx\n# entrenar_py.observe(model)\nrx.observe(1)\n")
    found = commands.read_script(Path("other.py"))
    assert found is not None
    assert not found.is_observed
    assert commands.read_script(Path(sys.executable)) is None


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node=2 no.py",
        "torchrun --nproc_per_node {world_size} /no.py",
        "env A=1 python -u no.py train.py",
        "accelerate launch --num_processes=2 no.py",
        "/bin/python3 -m torch.distributed.run no.py",
    ],
)
def test_a_script_that_does_not_exist(line: str) -> None:
    """It is refused before anything runs."""
    with pytest.raises(UsageError, match=r"no.py: no such file.*; give the path of the script"):
        commands.require_script(line.split(), Path.cwd())


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node=2 train.py",
        "torchrun -m no.module",
        "torchrun --no-python ./tool no.py",
        "torchrun train.sh no.py",
        "python -mtool no.py",
        "python {workdir}/no.py",
        "docker run image torchrun no.py",
        "srun python no.py",
        "./tool no.py",
        "uv run no.py",
    ],
)
def test_a_file_that_need_not_be_the_script(line: str) -> None:
    """A .py file may be an argument, or be where another program looks for it."""
    Path("train.sh").touch()
    commands.require_script(line.split(), Path.cwd())
