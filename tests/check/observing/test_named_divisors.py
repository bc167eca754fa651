"""Names that a script divides its loss by: counts of its own, and those of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py.check.observing import loss_terms

Written = Callable[[str], ModuleType]


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    caches = (loss_terms._divisors, loss_terms._apart, loss_terms._attributes)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def may_be_4(module: ModuleType) -> bool | None:
    return answered(module, lambda: loss_terms.may_divide_by(4))


def answered(module: ModuleType, question: Callable[[], bool | None]) -> bool | None:
    """Run the module, and return what is answered where it calls `tried`."""
    answers: list[bool | None] = []
    module.__dict__["tried"] = lambda: answers.append(question())
    file = str(module.__file__)
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return answers[0]


OWNED = """\
class Trainer:
    def __init__(self, tasks):
        self.tasks = tasks
    def loss_of(self, loss):
        return loss / self.tasks
    def train(self):
        tried()
Trainer({tasks}).train()
"""
REMOTE = """\
def criterion({given}):
    return {divided} / n
def train(n):
    tried()
train(3)
"""


@pytest.mark.parametrize(
    "text",
    [
        "heads = 4\ndef train(loss):\n    loss / heads\n    tried()\ntrain(1.0)\n",
        "def train(loss, n_tasks):\n    loss /= n_tasks\n    tried()\ntrain(1.0, 4)\n",
        "class Args:\n    k = 4\nargs = Args()\nloss = 1.0 * 1\nloss / args.k\ntried()\n",
        OWNED.format(tasks=4),
    ],
)
def test_a_count_of_the_script_s_own(text: str, written: Written) -> None:
    """It has the value where the loss begins its pass."""
    assert may_be_4(written(text))


CRITERION = """\
class Criterion:
    def __init__(self, tasks):
        self.tasks = tasks
    def forward(self, loss):
        return loss / self.tasks
criterion = Criterion({tasks})
tried()
"""


@pytest.mark.parametrize("tasks", [3, 4])
def test_a_number_of_an_object_that_does_not_run_now(tasks: int, written: Written) -> None:
    """A criterion keeps it, though its pass has ended."""
    assert may_be_4(written(CRITERION.format(tasks=tasks))) is (tasks == 4)


EVALUATE = """\
def evaluate(losses):
    n = len(losses)
    total_loss = sum(losses)
    return total_loss / n
def criterion(x):
    return x
class Optimizer:
    step = lambda self: None
def train(optimizer):
    for epoch in range(1):
        for batch in range(1):
            loss = criterion(1.0)
            tried()
            optimizer.step()
        evaluate([1, 2])
train(Optimizer())
"""


@pytest.mark.parametrize(
    "text",
    [
        REMOTE.format(given="loss, n", divided="loss"),
        REMOTE.format(given="x, n", divided="x.square().sum()"),
        EVALUATE.replace("    return x\n", "    return evaluate([x])\n"),
        EVALUATE.replace("criterion(1.0)", "(lambda: evaluate([1.0]))()"),
        EVALUATE + "best = evaluate\n",
        EVALUATE + "globals()['evaluate']\n",
        EVALUATE.replace("def evaluate", "@staticmethod\ndef evaluate"),
        EVALUATE.replace("            optimizer.step()\n", ""),
    ],
)
def test_a_number_that_nothing_knows_any_more(text: str, written: Written) -> None:
    """It is that of a function which has ended, and which may be called in a step."""
    assert may_be_4(written(text)) is None


@pytest.mark.parametrize("after", ["", "evaluate([1])\n"])
def test_a_function_that_no_step_calls_divides_no_loss(after: str, written: Written) -> None:
    """An average over what was evaluated has no part in the loss, whatever its number was."""
    assert may_be_4(written(EVALUATE + after)) is False


@pytest.mark.parametrize(
    "text",
    [
        "gas = 4\nloss = 1.0 * 1\nloss / gas\ntried()\n",
        "k = 4\nfor i in range(8):\n    if (i + 1) % k == 0: pass\nx = 1.0 * 1\nx / k\ntried()\n",
        "k = 4\ndef f(x):\n    for _ in range(k):\n        (x / k).backward()\ntried()\n",
        "k = 4\ndef f(x, o):\n    x / k\n    if o.n == k:\n        o.step()\ntried()\n",
        "k = 4\ndef f(A, x):\n    A(gradient_accumulation_steps=k)\n    x / k\ntried()\n",
        "heads = 3\nloss = 1.0 * 1\nloss / heads\ntried()\n",
        OWNED.format(tasks=2),
        REMOTE.format(given="x, n", divided="x"),
        "def mean(losses):\n    n = 0\n    n += 4\n    return losses / n\ntried()\n",
        "class Meter:\n    def add(self, x):\n        self.n += x\n"
        "    def mean(self):\n        return self.loss / self.n\ntried()\n",
        "def f(size):\n    return 100.0 / size\ntried()\n",
        "tried()\n",
    ],
)
def test_counts_of_micro_batches_and_other_numbers(text: str, written: Written) -> None:
    """Their use tells, or their value; and what was seen until then is no factor of a loss."""
    assert may_be_4(written(text)) is False


TWICE = "def a(o, loss):\n    o.backward(loss / gas)\n"


@pytest.mark.parametrize(
    ("text", "are_two"),
    [
        (TWICE + "def b(self, loss):\n    (loss / self.accumulation).backward()\ntried()\n", True),
        (TWICE + "tried()\n", False),
        (TWICE + "def b(loss, heads):\n    return loss / heads\ntried()\n", False),
        (TWICE + "def b(n):\n    return len(n) / gas\ntried()\n", False),
    ],
)
def test_two_places_that_divide_by_micro_batches(
    text: str, *, are_two: bool, written: Written
) -> None:
    """A half of a loss may be its own, unless the text has its number of micro-batches twice."""
    assert answered(written(text), loss_terms.are_two_counts) is are_two


class Engine:
    """What a library calls backward by."""

    gradient_accumulation_steps = 2

    def backward(self) -> bool:
        return bool(self.gradient_accumulation_steps) and loss_terms.are_two_counts()


@pytest.mark.parametrize(("text", "are_two"), [(TWICE, True), ("loss = 1.0\n", False)])
def test_a_library_divides_what_the_script_has_divided(
    text: str, *, are_two: bool, written: Written
) -> None:
    """It calls backward in a function that knows the number of micro-batches."""
    assert answered(written(text + "tried()\n"), Engine().backward) is are_two
