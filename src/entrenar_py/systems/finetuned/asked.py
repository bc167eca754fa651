"""What a scenario asks of a fine-tuning, in its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.model.settings import CLASS_WEIGHTS, METHODS, RECOMPUTED, STRATEGIES, TASKS

FAMILIES = ("qwen3", "llama", "gpt2")
# What a run records beside its training: samples and what the loss depended on; what it wrote, as
# stock libraries load it; the merged model; each step beside float64; a student's refusals.
FACTS = ("samples", "outputs", "merged", "gradients", "refusals")
_CHOICES = {
    "task": TASKS,
    "method": METHODS,
    "class_weights": CLASS_WEIGHTS,
    "family": FAMILIES,
    "strategy": STRATEGIES,
    "recompute": RECOMPUTED,
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a scenario: the model's family, what is learned, and which facts are recorded.

    `blocks` is the number of the model's blocks. `cuts` has, for each part of a run between two
    stops, each worker's blocks: its first, and the one after its last. Workers with the same blocks
    are copies. The last part's hold until the end. Without `cuts` stages have equal parts.

    Raises UsageError for a value that is not possible.
    """

    task: str = "instruct"
    method: str = "lora"
    rank: int = 2
    alpha: float = 6.0
    class_weights: str = "none"
    oversample: bool = False
    packing: bool = False
    marks: bool = False  # in the chat template, of what the assistant says
    family: str = "qwen3"
    strategy: str = "ddp"
    recompute: str = "none"
    blocks: int = 2
    cuts: tuple[tuple[tuple[int, int], ...], ...] = ()
    facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _refused(name, getattr(self, name), f"allowed are {', '.join(choices)}")
        if type(self.rank) is not int or self.rank < 1:
            raise _refused("rank", self.rank, "use a whole number >= 1")
        if type(self.blocks) is not int or self.blocks < 1:
            raise _refused("blocks", self.blocks, "use a whole number >= 1")
        if type(self.alpha) not in (int, float) or self.alpha <= 0:
            raise _refused("alpha", self.alpha, "use a number > 0")
        for name in ("oversample", "packing", "marks"):
            if type(getattr(self, name)) is not bool:
                raise _refused(name, getattr(self, name), "use true or false")
        if self.packing and self.task == "classify":
            raise _refused("packing", self.packing, "use task instruct or text with it")
        if self.method == "qlora" and self.family == "gpt2":
            raise _refused("family", self.family, "use qwen3 or llama with method qlora")
        if self.oversample and self.class_weights != "none":
            raise _refused("class_weights", self.class_weights, "with oversample, use none")
        if unknown := set(self.facts) - set(FACTS):
            raise _refused("facts", min(unknown), f"allowed are {', '.join(FACTS)}")

    @property
    def adapts(self) -> bool:
        """True if adapters are trained, False if all weights are."""
        return self.method != "full"

    @classmethod
    def of(cls, scenario: Scenario) -> Asked:
        """Return what `scenario` asks for."""
        given: dict[str, Any] = dict(scenario.options)
        given.pop("network_seed", None)  # the simulation's
        facts = given.pop("facts", ())
        if not isinstance(facts, list | tuple):
            raise _refused("facts", facts, f"use a list of {', '.join(FACTS)}")
        cuts = _cuts(given.pop("cuts", ()))
        return cls(**given, cuts=cuts, facts=tuple(map(str, facts)))


def _cuts(given: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the blocks of each worker, in each part of a run."""
    try:
        found = tuple(tuple((first, stop) for first, stop in part) for part in given)
    except (TypeError, ValueError):
        found = ((),)
    for part in found:
        at, before = 0, None
        for own in part:
            if own == before:
                continue  # a copy of the worker before it
            first, stop = before = own
            if type(first) is not int or type(stop) is not int or first != at or stop <= first:
                raise _refused("cuts", given, f"{part} has no stage from block {at} on")
            at = stop
    if not all(found):
        raise _refused("cuts", given, "use lists of [first, stop] for each worker")
    return found


def _refused(name: str, value: object, advice: str) -> UsageError:
    return UsageError(f"options {name}={value!r}: {advice}", field=name)
