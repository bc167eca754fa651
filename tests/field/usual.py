"""Verdicts that most scripts get, with their explanation."""

from __future__ import annotations

from tests.field.recipe import default, limit, undeclared

STEPS_AT_NAN = default(
    clause="F-DP-003",
    verdict="advice",
    words="after a non-finite value",
    because="A NaN was planted in one gradient of one rank. The all-reduce passes it "
    "to all ranks, and by default neither torch's optimizers nor "
    "`clip_grad_norm_` stop at it.",
    reproduction="nan_in_one_gradient.py",
)
ROUNDING_ON_GPUS = default(
    clause="F-TI-007",
    verdict="advice",
    words="kernels may add in any order",
    because="The kernel for the gradient of a convolution adds in any order, unless "
    "deterministic algorithms are requested. Two runs agree within rounding.",
    reproduction="gpu_kernels_in_any_order.py",
)
SAVES_LATER = undeclared(
    clause="F-TI-003",
    words="may write one later",
    because="The script saves its first checkpoint after more steps than were made here.",
)
IN_PIECES = tuple(
    limit(
        clause=clause,
        words=words,
        because="Sharded weights are gathered only for the script's own passes, so the "
        "check can't pass tokens to the model again.",
    )
    for clause, words in (
        ("F-LM-001", "its weights are"),
        ("F-LM-003", "no padding"),
    )
)
