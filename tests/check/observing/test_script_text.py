"""The text of a script, and the order of its lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.observing import loss_terms, script_text


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
def test_the_line_that_selects_rows(text: str, line: str, written: Callable[[str], None]) -> None:
    """What orders rows at random may go through them once: then no line is said to select."""
    written(text)
    assert script_text.selecting_line() == line


@pytest.mark.parametrize(
    ("text", "is_random"),
    [
        ("order = sorted(range(n), key=lengths.__getitem__)[rank::world]\n", False),
        ('"""Nobody shuffles."""\nx = torch.randn(96, 4)\nclass ByLength(Sampler):\n', False),
        ("loader = DataLoader(rows, sampler=own, shuffle=False)\n", False),
        (
            "from torch.utils.data import (\n    DistributedSampler,\n    Sampler,\n)\nx = 1\n",
            False,
        ),
        ("from a import Sampler, \\\n    RandomSampler\nimport numpy.random.shuffle\n", False),
        ("import torch; order = torch.randperm(9)\n", True),
        ("val = DistributedSampler(rows, shuffle=False)\n", False),
        ("train = DistributedSampler(rows, seed=1)\n", True),
        ("loader = DataLoader(rows, shuffle=True)\n", True),
        ("order = torch.randperm(n, generator=generator)\n", True),
        ("random.Random(seed).shuffle(order)\n", True),
        ("order = torch.rand(n).argsort()\n", True),
        ("class Own(DistributedSampler):\n", True),
    ],
)
def test_whether_anything_may_be_shuffled(
    text: str, is_random: bool, written: Callable[[str], None]
) -> None:
    """A script that draws no order has the one that its own sampler states."""
    written(text)
    assert script_text.shuffles() is is_random


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("loss = criterion(out, y) / 4", 4),
        ("loss /= 4.0", 4),
        ("loss = loss.div_(4)", 4),
        ("loss = kl / T**2", 9),
        ("loss = error / (2 * variance)", 6),
        ("loss = error / (2 * 2)", 4),
    ],
)
def test_a_number_that_the_script_divides_by(
    text: str, number: float, written: Callable[[str], None]
) -> None:
    """The number is written, or a part of it is, so that it is no count of micro-batches."""
    written(text)
    loss_terms._divisors.cache_clear()
    assert loss_terms.divides_by(number)
    loss_terms._divisors.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "loss / accumulation",
            "loss / len(parts)",
            "loss / 40",
            "n // 4",
            "x / 10000 ** (i / 8)",
        ),
        *("loss / (a + 4)", "x / -4", "loss / (5 * n)", "loss / 'a'", "a /"),
    ],
)
def test_numbers_that_may_be_counts(text: str, written: Callable[[str], None]) -> None:
    written(text)
    loss_terms._divisors.cache_clear()
    assert not any(map(loss_terms.divides_by, (4, -4, 0, float("inf"))))
    loss_terms._divisors.cache_clear()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("if epoch >= args.swa_start:", "selected.py:1"),
        ("scale = 1.0 if self.epoch < warmup else 0.1", "selected.py:1"),
        ("if start <= current_epoch:", "selected.py:1"),
        ("if epoch % save_every == 0:", "selected.py:1"),
        ("if dist.get_rank() == 0:\n    print(epoch)", ""),
        ("while epoch < num_epochs:", ""),
        ("for epoch in range(first_epoch, 9):", ""),
        ("epoch = 0", ""),
    ],
)
def test_a_line_that_heeds_the_number_of_an_epoch(
    text: str, line: str, written: Callable[[str], None]
) -> None:
    """It may do something else in later epochs; a loop through all of them does not."""
    written(text)
    assert script_text.line_by_epoch() == line


@pytest.mark.parametrize(("text", "is_read"), [("x = 1\n", True), ("{{ x }", False), ("\0", False)])
def test_a_text_is_parsed_once(text: str, *, is_read: bool) -> None:
    """A template is no Python."""
    tree = script_text.parsed(text)
    assert (tree is not None, script_text.parsed(text) is tree) == (is_read, True)


LOADS = re.compile(r"\btorch\.load\b|resume")

AT_THE_END = """
def train(step):
    for epoch in range(1):
        step()
    net = torch.load(path)
"""
IN_A_FUNCTION = """
def test():
    return restored(path)
def restored(path):
    return torch.load(path)
def train(step):
    step()
    test()
"""
OF_AN_OBJECT = """
class Trainer:
    def test(self):
        net = torch.load(self.path)
    def fit(self, step):
        while True:
            step()
            break
def train(step):
    trainer = Trainer()
    trainer.fit(step)
    print("test")
    if trainer.best:
        trainer.test()
Trainer.best, Trainer.path = False, ""
"""
IN_ANOTHER_BRANCH = """
def train(step, only_tests=False):
    if not only_tests:
        step()
    else:
        net = torch.load(path)
"""
LATER = {
    "at the end": AT_THE_END,
    "in a function": IN_A_FUNCTION.replace("    test()", "    if path: test()"),
    "of an object": OF_AN_OBJECT,
    "in another branch": IN_ANOTHER_BRANCH,
}
EARLIER = {
    "before": "def train(step):\n    if path: torch.load(path)\n    step()\n",
    "in the loop": AT_THE_END.replace("    net =", "        if path: net ="),
    "an option": f"def args(add):\n    add('--resume')\n{AT_THE_END}",
    "in a function that is called before, too": IN_A_FUNCTION.replace(
        "    step()\n    test()", "    if path: restored(path)\n    step()\n    if path: test()"
    ),
    "in a function that nobody calls": IN_A_FUNCTION.replace("    test()", ""),
    "in a function that is called by its name": IN_A_FUNCTION.replace(
        "    test()", "    if path: globals()['test']()"
    ),
    "in a method that is got by its name": OF_AN_OBJECT.replace(
        "        trainer.test()", "        getattr(trainer, 'test')()"
    ),
    "by another name": "from x import test as check\n" + LATER["in a function"],
    "a callback": "class Best:\n    def __call__(self):\n        torch.load(path)\n" + AT_THE_END,
    "to try once more": (
        "def train(step):\n    try:\n        step()\n    except OSError:\n        torch.load(0)\n"
    ),
    "as an argument": (
        "def train(step):\n    both(\n        step(),\n        path and torch.load(path),\n    )\n"
        "def both(*given): ...\n"
    ),
    "no such line": "def train(step):\n    step()\n",
}


def is_later(text: str, folder: Path) -> bool:
    """Return what is said of a script in the midst of its function `train`."""
    file, seen = str(folder / "own.py"), list[bool]()
    scope: dict[str, Any] = {"path": "", "torch": type("torch", (), {"load": str})}
    body = re.sub(r"^from .*", "", text)  # its lines keep their numbers
    exec(compile(body, file, "exec"), scope)
    train: Callable[..., Any] = scope["train"]
    train(lambda: seen.append(script_text.come_later(LOADS, {file: text})))
    return seen[0]


@pytest.mark.parametrize("name", LATER)
def test_a_line_that_runs_once_training_is_over(name: str, tmp_path: Path) -> None:
    """After the loop, in functions that are called there alone, or in place of it."""
    assert is_later(LATER[name], tmp_path)


@pytest.mark.parametrize("name", EARLIER)
def test_a_line_that_may_run_before(name: str, tmp_path: Path) -> None:
    """Whatever could be a resume, in code that runs or not, is one."""
    assert not is_later(EARLIER[name], tmp_path)


DRAWS = re.compile(r"\brandint\(")
IN_THE_LOOP = """
def rows(step):
    return randint(step)
def train(now):
    for epoch in range(1):
        batch = rows(0)
        now()
"""
OF_A_GENERATOR = """
def rows():
    while True:
        yield randint(0)
def train(now):
    for batch in rows():
        now()
        break
"""
OF_MICRO_BATCHES = """
class Data:
    def batch(self):
        return randint(0)
def train(now):
    data, loss, optimizer = Data(), Loss(), Loss()
    for epoch in range(1):
        batch = data.batch()
        for part in range(1):
            now()
            loss.backward()
        optimizer.step()
class Loss:
    backward = step = lambda self: None
"""
AGAIN = {
    "in the loop": IN_THE_LOOP,
    "beside a condition": IN_THE_LOOP.replace("    return", "    if step: randint(1)\n    return"),
    "of a generator": OF_A_GENERATOR,
    "of micro-batches": OF_MICRO_BATCHES,
}
ONCE = {
    "before the loop": "def train(now):\n    randint(0)\n    for epoch in range(1): now()\n",
    "once in an epoch": (
        "def train(now):\n    for epoch in range(1):\n        batch = randint(0)\n"
        "        for part in range(1):\n            now()\n"
    ),
    "now and then": IN_THE_LOOP.replace("batch =", "if epoch: batch ="),
    "in some calls": IN_THE_LOOP.replace("    return", "    if step: return"),
    "before a generator's loop": OF_A_GENERATOR.replace("yield randint(0)", "yield 0").replace(
        "    while", "    randint(0)\n    while"
    ),
    "without a loop": "def train(now):\n    randint(0)\n    now()\n",
}


def comes_again(
    text: str, folder: Path, look: Callable[..., bool | str] = script_text.line_again
) -> bool | str:
    """Return what is said of the lines that draw, in the midst of a script's function `train`."""
    file, seen = str(folder / "own.py"), list[bool | str]()
    scope: dict[str, Any] = {"randint": int}
    exec(compile(text, file, "exec"), scope)
    scope["train"](lambda: seen.append(look(DRAWS, {file: text})))
    return seen[0]


def test_the_line_that_draws_in_each_step_is_named(tmp_path: Path) -> None:
    """Not one before it, such as that of a function that samples from the model."""
    text = "def generate():\n    return randint(0)\n" + IN_THE_LOOP
    number = text.splitlines().index("    return randint(step)") + 1
    assert comes_again(text, tmp_path) == f"own.py:{number}"


@pytest.mark.parametrize("name", AGAIN)
def test_a_line_that_draws_in_each_step(name: str, tmp_path: Path) -> None:
    """By itself or in what is called there, under no condition."""
    assert comes_again(AGAIN[name], tmp_path)


@pytest.mark.parametrize("name", ONCE)
def test_a_line_that_may_draw_less_often(name: str, tmp_path: Path) -> None:
    """Rows that are drawn once in an epoch, or now and then, may be given twice by mistake."""
    assert not comes_again(ONCE[name], tmp_path)


MICRO_BATCHES = """
def rows(part):
    return randint(0)
def train(now):
    loss, optimizer, ddp = Part(), Part(), Part()
    for epoch in range(1):
        for micro in range(1):
            ddp.syncs = micro == 3
            now()
            batch = rows("train")
            loss.backward()
        optimizer.step()
class Part:
    turn = 0
    backward = step = lambda self: None
"""
WITHOUT = "            ddp.syncs = micro == 3\n"


@pytest.mark.parametrize(
    ("before", "after", "is_one"),
    [
        ("", "", True),
        (WITHOUT, "            syncs = None if micro < 3 else ddp.no_sync\n", True),
        ('rows("train")', "rows(micro)", False),
        ("in range(1):\n            ddp", 'in ["train", "books"]:\n            ddp', False),
        (WITHOUT, "            part = 1 if micro < 3 else 2\n", False),
        ("            now()", "            if micro == 0: part = 2\n            now()", False),
        ('            batch = rows("train")\n', "", False),
        ("        optimizer.step()", "            optimizer.step()", False),
        ("loss.backward()", "loss.backward(), loss.backward()", False),
        ("    return", "    Part.turn += 1\n    return", False),
        ('rows("train")', "rows(next(iter('ab')))", False),
        ("            now()", "            epoch += 1\n            now()", True),
        ('rows("train")', "rows(epoch)\n            epoch += 1", False),
        ('rows("train")', 'rows({"labels": 0}.pop("labels"))', True),
    ],
)
def test_micro_batches_that_are_drawn_alike(
    before: str, after: str, is_one: bool, tmp_path: Path
) -> None:
    """By a line that nothing of the loop changes; else they may be those of several tasks."""
    text = MICRO_BATCHES.replace(before, after, 1)
    assert comes_again(text, tmp_path, script_text.are_alike) is is_one


TASKS = """
import itertools
from collections import deque
class Part(list):
    backward = step = lambda self: None
    __getitem__ = lambda self, at: at
def taken():
    return next(tasks)
tasks = itertools.cycle("ab")
queue = deque("ab")
sizes = {"a": 8, "b": 8}
def train(now):
    loss, optimizer, data = Part(), Part(), Part()
    for step in range(1):
        for _ in range(1):
            now()
            task = 0
            rows = randint(8)
            batch = [data[row] for row in [rows]]
            loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "edits",
    [
        {"task = 0": "task = next(tasks)"},
        {"task = 0": "queue.rotate()"},
        {"task = 0": "task = queue.popleft()"},
        {"task = 0": "task = __import__('random').choice('ab')"},
        {"task = 0": "task = taken()"},
        {"task = 0": "task = min(sizes)", "randint(8)": "randint(sizes[task])"},
        {"task = 0": "task = Part()", "[data[row]": "[task[row]"},
        {"task = 0": "task = Part()", "batch = [data[row] for row in [rows]]": "x = task[rows]"},
    ],
)
def test_micro_batches_that_are_drawn_from_tasks_in_turn(
    edits: dict[str, str], tmp_path: Path
) -> None:
    """What is drawn from changes within the loop, so the losses may be those of several tasks."""
    assert comes_again(TASKS, tmp_path, script_text.are_alike)
    text = TASKS
    for before, after in edits.items():
        text = text.replace(before, after, 1)
    assert not comes_again(text, tmp_path, script_text.are_alike)
