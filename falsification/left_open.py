"""Right scripts that don't reach exit code 0, with the words of the reasons.

A comparison presupposes what doesn't hold in them or can't be tested, or they leave a fact unsaid.
`make twins` demands that all other right scripts hold every clause that applies, and that these
leave open what is written here, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Open:
    """The `scripts` of which each of the `checks` is inconclusive, with a reason that has `words`.

    Scripts are named as in the lists of twins.
    """

    words: str
    checks: tuple[str, ...]
    scripts: tuple[str, ...]


LEFT_OPEN = (
    Open(
        "no backward pass reached its parameters there",
        ("coverage", "finiteness", "weighting"),
        ("style: right, per_sample.py",),
    ),
    Open("the samples of each step are unknown", ("parity",), ("style: right, per_sample.py",)),
    Open("if an epoch has to draw every sample", ("coverage",), ("advice: growing epochs",)),
    Open(
        "the single-device run alone skipped step",
        ("parity", "weighting"),
        ("a GradScaler whose scale is too large at first with one worker alone",),
    ),
    Open(
        "random numbers are drawn between the backward pass and the step",
        ("weighting",),
        ("noise on the gradients, the same on all ranks",),
    ),
    Open(
        "draws its masks per rank",  # what each rank draws for its piece moves the later draws
        ("parity", "weighting"),
        ("together: a block cut by hand, with dropout",),
    ),
    Open(
        "seed the script alike",
        ("coverage", "determinism", "parity", "weighting"),
        ("a script with seeded weights, and an order of its own in every run",),
    ),
    Open(
        "buffers depend on the samples of a rank",
        ("parity", "weighting"),
        ("buffers: of each rank", "buffers: whole numbers of each rank"),
    ),
    Open(
        "ranks make different numbers of passes and steps",
        (
            "coverage",
            "finiteness",
            "optimizer_state",
            "parity",
            "randomness",
            "replica_identity",
            "weighting",
        ),
        ("ranks with fewer batches join",),
    ),
    Open(
        "if workers are meant to step alone",
        ("finiteness", "optimizer_state", "randomness", "replica_identity", "weighting"),
        ("streaming DiLoCo, undeclared",),
    ),
    Open(
        "one worker trains on batches",
        ("parity",),
        ("streaming DiLoCo, undeclared",),
    ),
    Open(
        "a copy, a piece or an expert",
        ("optimizer_state", "parity", "randomness", "replica_identity", "weighting"),
        ("an expert on each rank, under the same name",),
    ),
    Open(
        "call obs.loss(mean, weight)",
        ("weighting",),
        ("an optimizer for each tensor, which steps within the backward pass",),
    ),
    Open(
        "obs.samples(ids)",
        ("coverage", "parity", "weighting"),
        ("samples: each rank has a slice of the tensors",),
    ),
    Open(
        "call obs.skipped()",
        ("finiteness",),
        ("a flat partition with an inner optimizer (ZeRO-1), which skips a NaN",),
    ),
)


def words_of(script: str) -> dict[str, str]:
    """Return by check the words with which a right script leaves it open."""
    told = (one for one in LEFT_OPEN if script in one.scripts)
    return {check: one.words for one in told for check in one.checks}
