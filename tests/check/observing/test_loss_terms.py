"""What a backward pass begins at, and by which numbers a script divides its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.check.observing import loss_terms
from entrenar_py.check.observing.loss_terms import Begun, Losses

LABELS = torch.tensor([-100, 1, 2, 3, 4, 0])


def outputs() -> Tensor:
    return torch.arange(30.0).reshape(6, 5).requires_grad_()


def begun(loss: Tensor) -> Begun:
    return Losses().begun(loss, is_plain=True)


def _masked(x: Tensor) -> Tensor:
    mask = LABELS >= 0
    return (F.cross_entropy(x, LABELS, reduction="none") * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss_of", "terms"),
    [
        (lambda x: F.cross_entropy(x, LABELS) / 4, ((5.0, 0.05, 4.0, 5.0),)),
        (lambda x: 0.25 * F.cross_entropy(x, LABELS), ((5.0, 0.05, 5.0),)),
        (lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 10, ((5.0, 0.1, 10.0),)),
        (lambda x: F.cross_entropy(x, LABELS, reduction="none").sum(), ((5.0, 1.0),)),
        (
            lambda x: F.cross_entropy(x, LABELS, reduction="sum", label_smoothing=0.1) / 5,
            ((5.0, 0.18, 5.0), (5.0, 0.1 / 25, 5.0)),
        ),
        (lambda x: torch.where(LABELS > 1, x.mean(1), torch.zeros(6)).sum(), ((3.0, 1.0),)),
        (lambda x: torch.where(LABELS > 1, 0.0, x.mean(1)).sum(), ((3.0, 1.0),)),
        (_masked, ((5.0, 0.2, 5.0),)),
        (lambda x: F.mse_loss(x, torch.zeros(6, 5)), ((30.0, 1 / 30, 30.0),)),
        (lambda x: (x - 1).abs().mean(), ((30.0, 1 / 30, 30.0),)),
        (lambda x: (x - 1).abs().mean(1).sum(), ((6.0, 1.0),)),
        (lambda x: x.square().mean().sqrt() / 3, ((0.0, 1 / 3, 3.0),)),
        (lambda x: (2 - x.mean() * 0.5) / 2, ((30.0, -0.25 / 30, 2.0, 30.0),)),
        (lambda x: x.mean().bfloat16().view(1) / 2, ((30.0, 0.5 / 30, 2.0, 30.0),)),
        (
            lambda x: torch.stack([x.mean(), x.sum()]).mean(),
            ((30.0, 0.5 / 30, 2.0, 30.0), (30.0, 0.5, 2.0)),
        ),
        (lambda x: x[0, :2].mean() / 2, ((2.0, 0.25, 2.0, 2.0),)),
        (lambda x: x.mean() + 0.1 * x.sum(), ((30.0, 1 / 30, 30.0), (30.0, 0.1))),
        (lambda x: x.mean() * x.sum(), ((0.0, 1.0),)),
    ],
)
def test_terms_are_divided_as_the_script_divides_them(
    loss_of: Callable[[Tensor], Tensor], terms: tuple[tuple[float, ...], ...]
) -> None:
    """Reductions are found below divisions, products, sums and casts; other nodes end the walk."""
    loss = loss_of(outputs())
    found = begun(loss)
    assert found.value == float(loss.detach())
    assert found.terms == tuple(pytest.approx(term) for term in terms)


def test_a_number_of_the_loss_beside_that_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float, or a number in the script's text, is no count; of two equal ones one is left.

    A mean of losses may be divided by their number, and a single divisor may be any.
    """
    monkeypatch.setattr(loss_terms, "divides_by", lambda number: number == 3)
    monkeypatch.setattr(loss_terms, "may_divide_by", lambda number: number == 5)
    loss = outputs().mean()
    divided = (loss / 2.0**2 / 4, loss / 4 / 4, loss / 3 / 3, loss / 3, loss / 5 / 5)
    counted = [begun(one).terms[0][2:] for one in divided]
    assert counted == [(4.0, 30.0), (4.0, 4.0, 30.0), (3.0, 30.0), (3.0, 30.0), (5.0, 30.0)]
    assert [len(term) for term in begun((loss + outputs().mean()) / 2.0 / 2).terms] == [5, 5]


def test_a_number_that_may_be_one_of_the_loss_leaves_it_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two equal divisors count once if one is the loss's own, and twice if none is."""
    monkeypatch.setattr(loss_terms, "divides_by", lambda number: False)
    monkeypatch.setattr(loss_terms, "may_divide_by", lambda number: None if number == 3 else False)
    loss = outputs().mean()
    assert [len(begun(one).terms) for one in (loss / 3 / 3, loss / 3)] == [0, 1]


def test_weights_of_classes_leave_the_number_of_elements_unknown() -> None:
    """A mean over weighted classes is divided by no number of samples."""
    loss = F.cross_entropy(outputs(), LABELS, weight=torch.arange(1.0, 6.0)) / 2
    assert begun(loss).terms == ((0.0, 0.5, 2.0),)


def test_a_scale_is_taken_out_of_a_loss_and_its_terms() -> None:
    """Before or after other divisions; and a scale under which the loss is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = Losses()
    loss = outputs().mean()
    for root in (scaler.scale(loss) / 4, scaler.scale(loss / 4)):
        losses.scaled(8.0, loss)
        assert losses.begun(root, is_plain=True) == Begun(
            float(loss.detach() / 4), ((30.0, 1 / 120, 4.0, 30.0),), 8.0
        )
    half = torch.tensor(60000.0, dtype=torch.float16, requires_grad=True).clone()
    losses.scaled(8.0, half)
    assert losses.begun(scaler.scale(half), is_plain=True).value == 60000.0


def test_a_loss_that_another_scaler_scaled_is_unknown() -> None:
    losses = Losses()
    losses.scaled(8.0, torch.tensor(1.0))
    assert losses.begun(outputs().mean() * 2, is_plain=True).value is None


def test_a_given_gradient_and_a_graph_that_is_gone_have_no_terms() -> None:
    """What nobody can know is not guessed."""
    loss = (outputs() * outputs()).mean() * torch.tensor(2.0)
    assert Losses().begun(loss, is_plain=False) == Begun(float(loss.detach()))
    assert begun(torch.tensor(1.0, requires_grad=True)).terms == ()
    other = F.cross_entropy(outputs(), LABELS)
    other.backward()  # type: ignore[no-untyped-call]
    assert begun(other).terms == ()


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
