"""The loss and the gradient of a distillation are the textbook's, on rows that are drawn.

The textbook is in float64, over the classes of a row: the tokens that are kept, and the rest. What
may be off is what float32 rounding explains. Each planted bug breaks the properties that name it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.train.distill import student as loss
from entrenar_py.train.distill import teacher
from entrenar_py.train.distill.student import Mix, Taught
from entrenar_py.train.distill.teacher import Kept
from falsification.distillation import renormalised

Array = Any  # an ndarray in float64; tokens and targets in int64

VOCABULARY = 24
UNIT = 2.0**-24  # of float32, to nearest
# Roundings in a row's loss or in an element of its gradient, each of the largest size there is: a
# fifth of that was seen.
OPERATIONS = 8.0
DIFFERENCE = 1e-4  # of finite differences; their error is of the order of its square
TEMPERATURES = (1.0, 2.0, 4.0, 10.0)

_divergence, _loss_and_gradient = loss.divergence, loss._loss_and_gradient
_kept_of = teacher.kept_of


@dataclass(frozen=True)
class Rows:
    """Rows in float64: logits [n, V], what is kept of them [n, k], and what the trainer makes."""

    mix: Mix
    student: Array
    teacher: Array
    targets: Array
    tokens: Array
    kept: Array
    rest: Array
    losses: Array
    gradients: Array

    def classes(self, logits: Array) -> Array:
        """Return log-probabilities by class, [n, k] or [n, k + 1], of logits [n, V]."""
        logs = log_softmax(logits)
        kept = np.take_along_axis(logs, self.tokens, 1)
        if not self.mix.has_rest:
            return kept
        np.put_along_axis(logs, self.tokens, -np.inf, 1)
        return np.concatenate([kept, log_sum(logs)], 1)

    def wanted(self) -> Array:
        """Return the teacher's log-probabilities by class, as they are kept."""
        return (
            np.concatenate([self.kept, self.rest[:, None]], 1) if self.mix.has_rest else self.kept
        )

    def loss(self, logits: Array) -> Array:
        """Return the loss of each row."""
        t, alpha = self.mix.temperature, self.mix.alpha
        wanted, found = log_softmax(self.wanted() / t), log_softmax(self.classes(logits) / t)
        shares = np.exp(wanted)
        with np.errstate(invalid="ignore"):
            divergence = t**2 * np.where(shares > 0, shares * (wanted - found), 0.0).sum(1)
        entropy = -np.take_along_axis(log_softmax(logits), self.targets[:, None], 1)[:, 0]
        return alpha * divergence + (1 - alpha) * entropy

    def largest(self) -> Array:
        """Return the largest size of a row's log-probabilities, of teacher and student."""
        both = self.wanted(), np.abs(self.student) + np.abs(log_softmax(self.student))
        sizes = [np.where(np.isfinite(logs), np.abs(logs), 0.0).max(1) for logs in both]
        return 1 + np.maximum(*sizes)

    def rounding(self) -> Array:
        """Return what rounding explains of each row's loss.

        A log-probability is rounded by UNIT of its size; that of a softened one counts T of it.
        """
        t, alpha, largest = self.mix.temperature, self.mix.alpha, self.largest()
        soft = t * largest + t**2 * (np.log(VOCABULARY) + largest / t)
        return OPERATIONS * UNIT * (alpha * soft + (1 - alpha) * largest)


def log_sum(values: Array) -> Array:
    """Return the log of the sum of exponentials of each row, [n, 1]."""
    top = values.max(1, keepdims=True)
    return np.log(np.exp(values - top).sum(1, keepdims=True)) + top


def log_softmax(values: Array) -> Array:
    """Return the values less the log of the sum of exponentials of their row."""
    return values - log_sum(values)


def drawn(
    *,
    alpha: float,
    top_k: int = 6,
    temperature: float = 2.0,
    spread: float = 2.0,
    num_rows: int = 100,
    is_alike: bool = False,
) -> Rows:
    """Return rows of one seed, and what the trainer makes of them.

    The head is the identity, whose products are exact: the last hidden states are the logits.
    """
    draw = np.random.default_rng(0)
    both = [
        torch.from_numpy(draw.normal(0, spread, (num_rows, VOCABULARY))).float() for _ in range(2)
    ]
    targets = torch.from_numpy(draw.integers(VOCABULARY, size=num_rows))
    targets[::7] = both[1].argmax(-1)[::7]
    mix, head = Mix(alpha, temperature, has_rest=top_k < VOCABULARY), torch.eye(VOCABULARY)
    kept = teacher.kept_of(both[1].clone(), top_k=top_k, known=VOCABULARY, stored=torch.float32)
    rows = Taught(targets, kept.tokens.long(), kept.log_probabilities, kept.rest)
    hidden = both[1 if is_alike else 0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss.of_hidden(hidden, head, rows, mix), hidden)
    with torch.no_grad():
        losses = [
            float(
                loss.of_hidden(hidden[n : n + 1], head, Taught(*(p[n : n + 1] for p in rows)), mix)
            )
            for n in range(num_rows)
        ]
    return Rows(
        mix=mix,
        student=in_float64(hidden),
        teacher=in_float64(both[1]),
        targets=targets.numpy(),
        tokens=rows.tokens.numpy(),
        kept=in_float64(kept.log_probabilities),
        rest=in_float64(kept.rest),
        losses=np.array(losses),
        gradients=in_float64(gradient),
    )


def in_float64(tensor: Tensor) -> Array:
    """Return a tensor's values."""
    return tensor.detach().double().numpy()


def within(gap: Array, allowed: Array | float) -> None:
    """Assert that no row is further off than is explained."""
    assert (gap <= allowed).all(), f"off by {gap.max():.3g}"


# --- properties -----------------------------------------------------------------------------------


def no_divergence_is_negative() -> None:
    """1,000 pairs, at several temperatures and spreads, with one token kept, some and all."""
    for top_k, temperature, spread in (
        (6, 1.0, 2.0),
        (1, 2.0, 4.0),
        (23, 4.0, 1.0),
        (24, 0.5, 3.0),
    ):
        rows = drawn(alpha=1.0, top_k=top_k, temperature=temperature, spread=spread, num_rows=250)
        within(-rows.losses, rows.rounding())


def a_student_that_is_its_teacher_has_none() -> None:
    """Also where the teacher is so sure that the rest has nearly no mass."""
    subjects: list[dict[str, Any]] = [{"top_k": 6}, {"top_k": 24}]
    subjects += [{"spread": 8, "temperature": t} for t in TEMPERATURES[1:]]
    for subject in subjects:
        rows = drawn(alpha=1.0, is_alike=True, **subject)
        within(np.abs(rows.losses), rows.rounding())


def without_the_teacher_it_is_cross_entropy() -> None:
    """At temperature 1, whatever is kept and at whatever temperature the teacher is softened."""
    for top_k in (1, 6, 24):
        as_the_textbook(drawn(alpha=0.0, top_k=top_k, temperature=3.0))


def the_teachers_part_is_the_divergence() -> None:
    """T^2 KL(teacher_T || student_T) over the kept tokens and the rest."""
    for top_k in (1, 6):
        for temperature in TEMPERATURES:
            as_the_textbook(drawn(alpha=1.0, top_k=top_k, temperature=temperature))


def as_the_textbook(rows: Rows) -> None:
    """Assert that each row's loss is the textbook's."""
    within(np.abs(rows.losses - rows.loss(rows.student)), rows.rounding())


def hot_distributions_are_nearly_uniform() -> None:
    """T (s - q) is (u - v) / n less its mean, up to (r^2 + r'^2) / (n T) for ranges r, r'."""
    rows = drawn(alpha=1.0, top_k=24, temperature=1000.0, spread=1.0)
    student, taught = log_softmax(rows.student), log_softmax(rows.teacher)
    apart = (student - taught) / VOCABULARY
    ranges = np.ptp(student, axis=1) ** 2 + np.ptp(taught, axis=1) ** 2
    allowed = ranges / (VOCABULARY * 1000.0) + OPERATIONS * UNIT * 1000.0 / VOCABULARY
    within(np.abs(rows.gradients - apart + apart.mean(1, keepdims=True)).max(1), allowed)


def gradients_are_finite_differences() -> None:
    """Of both parts, alone and together, and of rows whose unlikely tokens have no mass."""
    subjects: list[dict[str, Any]] = [
        {"alpha": alpha, "top_k": top_k, "temperature": temperature}
        for alpha in (0.0, 0.3, 1.0)
        for top_k, temperature in ((1, 2.0), (6, 1.0), (24, 4.0))
    ]
    for subject in [*subjects, {"alpha": 0.5, "temperature": 10.0, "spread": 40.0}]:
        rows = drawn(num_rows=20, **subject)
        due = np.empty_like(rows.gradients)
        for column, moved in enumerate(DIFFERENCE * np.eye(VOCABULARY)):
            due[:, column] = rows.loss(rows.student + moved) - rows.loss(rows.student - moved)
        scale = rows.mix.alpha * rows.mix.temperature + 1
        allowed = OPERATIONS * UNIT * scale * rows.largest() + 10 * DIFFERENCE**2 * scale
        within(np.abs(rows.gradients - due / (2 * DIFFERENCE)).max(1), allowed)


def gradients_have_one_size_over_temperatures() -> None:
    """The derivative of a softmax has its eigenvalues, but for 0, between its least and its largest
    probability. So at any T >= 1 the norm is exp(-r) to exp(r) times |u - v| / n, for a range r.
    """
    every = [drawn(alpha=1.0, top_k=24, temperature=t, spread=0.2) for t in TEMPERATURES]
    norms = np.array([np.linalg.norm(rows.gradients, axis=1) for rows in every])
    ranges = np.maximum(*(np.ptp(one, axis=1) for one in (every[0].student, every[0].teacher)))
    within(norms.max(0) / norms.min(0), np.exp(2 * ranges))


def with_all_tokens_it_is_the_dense_distribution() -> None:
    """No token is missing, nothing is left, and probabilities and losses are the dense ones."""
    for alpha, temperature in ((1.0, 1.0), (1.0, 3.0), (0.5, 2.0)):
        rows = drawn(alpha=alpha, top_k=24, temperature=temperature)
        assert (np.sort(rows.tokens, 1) == np.arange(VOCABULARY)).all()
        assert (rows.rest == -np.inf).all()
        dense = np.take_along_axis(log_softmax(rows.teacher), rows.tokens, 1)
        within(np.abs(dense - rows.kept).max(1), rows.rounding())
        as_the_textbook(rows)


PROPERTIES: Sequence[Callable[[], None]] = (
    no_divergence_is_negative,
    a_student_that_is_its_teacher_has_none,
    without_the_teacher_it_is_cross_entropy,
    the_teachers_part_is_the_divergence,
    hot_distributions_are_nearly_uniform,
    gradients_are_finite_differences,
    gradients_have_one_size_over_temperatures,
    with_all_tokens_it_is_the_dense_distribution,
)

# --- planted bugs, and right losses that are not ours ---------------------------------------------


def negated(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Subtracts the wrong way round."""
    return -_divergence(wanted, found, temperature)


def not_normalised(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Divides log-probabilities by T, and takes them for log-probabilities."""
    shares = (wanted / temperature).exp()
    return temperature**2 * (shares * (wanted - found) / temperature).nan_to_num().sum(-1)


def exchanged(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Takes the teacher for the student."""
    return _divergence(found, wanted, temperature)


def without_square(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Leaves T^2 out."""
    return _divergence(wanted, found, temperature) / temperature**2


def by_kl_div(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Calls torch's own divergence."""
    logs = [(one / temperature).log_softmax(-1) for one in (found, wanted)]
    return temperature**2 * F.kl_div(logs[0], logs[1].exp(), reduction="none").sum(-1)


def entropy_at_temperature(*parts: Any) -> tuple[Tensor, Tensor]:
    """Softens the cross entropy, too."""
    logits, targets, _, _, mix = parts
    picked = targets[:, None].clamp(min=0)
    soft, plain = (
        -one.log_softmax(-1).gather(1, picked).sum() for one in (logits / mix.temperature, logits)
    )
    found, gradient = _loss_and_gradient(*parts)
    return found + (1 - mix.alpha) * (soft - plain), gradient


def gradient_over_square(*parts: Any) -> tuple[Tensor, Tensor]:
    """Multiplies the loss by T^2, and not its gradient."""
    found, gradient = _loss_and_gradient(*parts)
    return found, gradient / parts[-1].temperature ** 2


def rest_is_constant(*parts: Any) -> tuple[Tensor, Tensor]:
    """Passes no gradient to tokens that are not kept."""
    found, gradient = _loss_and_gradient(*parts)
    return found, gradient * torch.zeros_like(gradient).scatter(1, parts[2], 1.0)


def by_autograd(
    logits: Tensor, targets: Tensor, tokens: Tensor, taught: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Lets autograd find the gradient."""
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        rows = Taught(targets, tokens, taught[:, : tokens.shape[1]], taught[:, -1])
        found = loss.of_logits(leaf, rows, mix)
        (gradient,) = torch.autograd.grad(found, leaf)
    return found.detach(), gradient


def unlikely_half_cut(logits: Tensor, **how: Any) -> Kept:
    """Cuts off the less likely half of a whole distribution."""
    kept = _kept_of(logits, **how)
    middle = kept.log_probabilities.median(-1, keepdim=True).values
    cut = torch.where(kept.log_probabilities < middle, -40.0, kept.log_probabilities)
    return Kept(kept.tokens, cut, kept.rest)


def rest_by_difference(logits: Tensor, **how: Any) -> Kept:
    """Takes for the rest what the kept tokens leave of 1, which rounding decides."""
    kept = _kept_of(logits, **how)
    left = 1 - kept.log_probabilities.double().exp().sum(-1)
    return Kept(kept.tokens, kept.log_probabilities, left.clamp(min=0).log().float())


# What is replaced, by what -> the properties that find it.
BUGS: dict[tuple[Any, str, Callable[..., Any]], tuple[Callable[[], None], ...]] = {
    (loss, "divergence", negated): (no_divergence_is_negative,),
    (loss, "divergence", not_normalised): (the_teachers_part_is_the_divergence,),
    (loss, "divergence", exchanged): (the_teachers_part_is_the_divergence,),
    (loss, "divergence", without_square): (the_teachers_part_is_the_divergence,),
    (loss, "of_teacher", renormalised): (the_teachers_part_is_the_divergence,),
    (loss, "_loss_and_gradient", entropy_at_temperature): (
        without_the_teacher_it_is_cross_entropy,
    ),
    (loss, "_loss_and_gradient", gradient_over_square): (
        hot_distributions_are_nearly_uniform,
        gradients_have_one_size_over_temperatures,
    ),
    (loss, "_loss_and_gradient", rest_is_constant): (gradients_are_finite_differences,),
    (teacher, "kept_of", unlikely_half_cut): (with_all_tokens_it_is_the_dense_distribution,),
    (teacher, "kept_of", rest_by_difference): (a_student_that_is_its_teacher_has_none,),
}
RIGHT = (
    (loss, "divergence", by_kl_div, the_teachers_part_is_the_divergence),
    (loss, "_loss_and_gradient", by_autograd, gradients_are_finite_differences),
)


@pytest.mark.parametrize("prove", PROPERTIES, ids=lambda prove: prove.__name__)
def test_the_loss_is_the_textbooks(prove: Callable[[], None]) -> None:
    prove()


FOUND = [
    pytest.param(*place, broken, id=f"{place[2].__name__}-{broken.__name__}")
    for place, properties in BUGS.items()
    for broken in properties
]


@pytest.mark.parametrize(("module", "name", "bug", "broken"), FOUND)
def test_each_planted_bug_is_found(
    module: Any,
    name: str,
    bug: Callable[..., Any],
    broken: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        broken()


@pytest.mark.parametrize(("module", "name", "other", "prove"), RIGHT)
def test_another_right_loss_is_left_alone(
    module: Any,
    name: str,
    other: Callable[..., Any],
    prove: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own divergence, and the gradient of autograd."""
    monkeypatch.setattr(module, name, other)
    prove()
