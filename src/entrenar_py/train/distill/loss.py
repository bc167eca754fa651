"""The loss that learns from a teacher, without ever holding all logits.

    alpha T^2 KL(teacher_T || student_T) + (1 - alpha) cross entropy        (Hinton et al., 2015)

summed over positions. The teacher's distribution has its k most likely tokens and, as one more
class, the mass of all others; the student's is put into the same classes, and both are then raised
to 1 / T and normalised. With all tokens kept there is no such class, and this is the divergence of
softmax(z / T). All of it is in float32, from log-softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from entrenar_py.train.model import fused_loss, precision


@dataclass(frozen=True)
class Mix:
    """How both parts of the loss are weighed: `alpha` in [0, 1], and the temperature T > 0.

    `has_rest` is false where the teacher's rows have every token of the vocabulary.
    """

    alpha: float
    temperature: float
    has_rest: bool


class Taught(NamedTuple):
    """The lesson of m positions: `targets` int64 [m], negative where nothing is to be learned.

    Of the teacher there are `tokens` int64 [m, k], `log_probabilities` [m, k], and `rest`, the log
    of the mass of all other tokens, [m].
    """

    targets: Tensor
    tokens: Tensor
    log_probabilities: Tensor
    rest: Tensor


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(teacher_T || student_T) of each row, float32 [m].

    Both are log-probabilities [m, classes] at temperature 1. A class of the teacher without mass,
    -inf, counts nothing.
    """
    wanted = (teacher / temperature).log_softmax(-1)
    found = (student / temperature).log_softmax(-1)
    shares = wanted.exp()
    # 0 * (-inf - x) is no number, and a class without mass has none of the divergence.
    terms = torch.where(shares > 0, shares * (wanted - found), 0.0)
    return temperature**2 * terms.sum(-1)


def of_teacher(taught: Taught, mix: Mix) -> Tensor:
    """Return the teacher's log-probabilities by class, float32 [m, k] or [m, k + 1]."""
    kept = taught.log_probabilities.float()
    return torch.cat([kept, taught.rest.float()[:, None]], -1) if mix.has_rest else kept


def of_logits(logits: Tensor, taught: Taught, mix: Mix) -> Tensor:
    """Return the summed loss of `logits` [m, vocabulary], 0-d float32."""
    logs = logits.float().log_softmax(-1)
    is_there = taught.targets >= 0
    student = logs.gather(1, taught.tokens)
    if mix.has_rest:
        others = logs.scatter(1, taught.tokens, -torch.inf).logsumexp(-1, keepdim=True)
        student = torch.cat([student, others], -1)
    apart = divergence(of_teacher(taught, mix), student, mix.temperature)
    entropy = -logs.gather(1, taught.targets.clamp(min=0)[:, None])[:, 0]
    mixed = mix.alpha * apart + (1 - mix.alpha) * entropy
    return torch.where(is_there, mixed, 0.0).sum()


def of_hidden(hidden: Tensor, weight: Tensor, taught: Taught, mix: Mix) -> Tensor:
    """Return `of_logits` of `hidden @ weight.T`, some hundred positions at a time.

    `hidden` is [m, d], and `weight` [vocabulary, d]. The products have the format of
    torch.autocast, where that is on.
    """
    dtype = precision.current(hidden.device)
    if dtype != torch.float32:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with precision.as_given(hidden.device):
        given = hidden, weight, taught.targets, taught.tokens, of_teacher(taught, mix), mix
        result: Tensor = _Distilled.apply(*given)  # type: ignore[no-untyped-call]
    return result


class _Distilled(torch.autograd.Function):
    """See `of_hidden`. The gradients are computed in the forward pass, at scale 1.

    With u the student's log-probabilities by class, s = softmax(u / T) and q the teacher's, the
    divergence's derivative by u is T (s - q), which sums to 0. So that by a logit of a kept token
    is T (s - q) of its class, and by any other one T (s - q) of the rest, times its share there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tokens: Tensor,
        teacher: Tensor,
        mix: Mix,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        rows = max(1, fused_loss.LOGITS_MAX // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ weight.t()).float()
            found, gradient = _loss_and_gradient(
                logits, targets[part], tokens[part], teacher[part], mix
            )
            loss += found
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight += gradient.t() @ hidden[part]
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`, times that of the loss."""
        found = (None if one is None else one * scale.to(one.dtype) for one in ctx.saved_tensors)
        return (*found, None, None, None, None)


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, tokens: Tensor, teacher: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some positions, and its gradient [m, vocabulary].

    `logits` is float32, and its memory is used for the gradient. Passes over the vocabulary are
    what takes time: there are six of them.
    """
    alpha, temperature = mix.alpha, mix.temperature
    is_there = targets >= 0
    wanted = targets.clamp(min=0)[:, None]
    kept, target = logits.gather(1, tokens), logits.gather(1, wanted)
    whole, student = kept.logsumexp(-1, keepdim=True), kept
    if mix.has_rest:
        _put(logits, tokens, torch.full_like(kept, -torch.inf))
        top = logits.amax(-1, keepdim=True)
        # Less their own maximum, since beside a token that is sure all others may vanish.
        logits -= top
        mass = logits.exp_().sum(-1, keepdim=True)
        rest = mass.log() + top
        whole = torch.logaddexp(whole, rest)
        student = torch.cat([kept, rest], -1)
    student = student - whole
    entropy = (whole - target)[:, 0]
    found = (student / temperature).log_softmax(-1)
    shares = (teacher / temperature).log_softmax(-1).exp()
    loss = alpha * divergence(teacher, student, temperature) + (1 - alpha) * entropy
    counts = is_there[:, None].to(logits.dtype)
    # Of each class: the part of the divergence, and that of cross entropy but for the target's -1.
    parts = alpha * temperature * (found.exp() - shares) + (1 - alpha) * student.exp()
    parts *= counts
    if mix.has_rest:
        logits *= parts[:, -1:] / mass
    _put(logits, tokens, parts[:, : tokens.shape[1]])
    _put(logits, wanted, logits.gather(1, wanted) - (1 - alpha) * counts)
    return torch.where(is_there, loss, 0.0).sum(), logits


def _put(into: Tensor, columns: Tensor, values: Tensor) -> None:
    """Write `values` [m, k] into the `columns`, int64 [m, k], of each row; they are distinct.

    So any kernel gives the same bits. Those for columns that are not would wait for a GPU.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Not `torch.use_deterministic_algorithms`: it has compiled blocks of a model compiled again.
    torch._C._set_deterministic_algorithms(False)
    try:
        into.scatter_(1, columns, values)
    finally:
        torch._C._set_deterministic_algorithms(is_on, warn_only=only_warns)
