"""Bits of one rank's activations, gradients or weights flip or stick, and audits find the rank.

`python -m tests.train.elastic.audits N [SEED]` makes N runs in which a random bit of a random rank
flips once, and N in which it sticks, and prints what became of them. `... planned` makes the runs
of `test_audit.py`, and prints what came of them as JSON. `... clean STEPS` makes a long run without
a fault. `... cost STEPS` measures what audits of 1 % cost.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

import entrenar_py
from tests.train.elastic.runs import (
    MICRO_BATCHES,
    PATIENT_S,
    STEPS,
    Death,
    Outcome,
    Report,
    batches,
    digest,
    in_one_process,
    model,
    prepare,
    run,
    wait_for_newcomers,
)

PLACES = ("activation", "gradient", "weight")


@dataclass(frozen=True)
class Fault:
    """Bit `bit` of element `element` of a tensor of the rank at `seat` flips or sticks.

    It flips once, in the `turn`-th micro-batch that the rank computes from `step` on, or sticks at
    `stuck` (0 or 1) from then on. `tensor` counts the outputs of layers, or parameters. Element and
    bit are taken modulo their numbers.
    """

    place: str
    seat: int
    step: int
    turn: int = 0
    tensor: int = 0
    element: int = 0
    bit: int = 30
    stuck: int | None = None

    def strike(self, tensor: Tensor) -> None:
        """Flip the bit, or set it to what it is stuck at."""
        raw = tensor.data.view(-1).view(torch.uint8)
        size = tensor.element_size()
        at = self.element % tensor.numel() * size + self.bit // 8 % size
        mask = 1 << self.bit % 8
        byte = int(raw[at])
        raw[at] = byte ^ mask if self.stuck is None else (byte & ~mask) | mask * self.stuck


class Striker:
    """Lets a fault strike the model of this process."""

    def __init__(self, fault: Fault, layers: Any) -> None:
        self._fault, self._turn, self._step, self._over = fault, 0, 0, False
        self._parameters = list(layers.parameters())
        if fault.place == "activation":
            layer = (layers.first, layers.second)[fault.tensor % 2]
            layer.register_forward_hook(lambda *given: self._strike(given[-1]))
        elif fault.place == "gradient":
            parameter = self._parameters[fault.tensor % len(self._parameters)]
            parameter.register_post_accumulate_grad_hook(lambda one: self._strike(one.grad))

    def begin(self, step: int) -> None:
        """Note that a micro-batch of `step` begins."""
        self._turn += step >= self._fault.step
        if self._fault.place == "weight":
            self._strike(self._parameters[self._fault.tensor % len(self._parameters)])

    def _strike(self, tensor: Tensor) -> None:
        if self._turn <= self._fault.turn or self._over:
            return
        self._over = self._fault.stuck is None
        with torch.no_grad():
            self._fault.strike(tensor)


def train(
    report: Report,
    fault: Fault | None = None,
    passes: Callable[[int, str, int], None] = lambda step, moment, generation: None,
    *,
    audit: float = 1.0,
    num_steps: int = STEPS,
    records: bool = True,
    waits: Sequence[int] = (),
) -> int:
    """Train as one rank of the environment, and report the digest in the end.

    With `records`, also a hash of each micro-batch's gradients, as far as they can be seen. With
    `waits`, these steps are not made before all seats are taken.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    layers, optimizer, schedule = model()
    striker = None
    if fault is not None and int(os.environ["RANK"]) == fault.seat:
        striker = Striker(fault, layers)
    trainer = entrenar_py.elastic(
        layers,
        optimizer,
        micro_batches=MICRO_BATCHES,
        schedulers=[schedule],
        deadline_s=PATIENT_S,
        audit=audit,
    )
    report(f"joined {trainer.step}")
    for step in trainer.steps(num_steps):
        if step in waits and trainer.world_size < int(os.environ["WORLD_SIZE"]):
            wait_for_newcomers(trainer)
        for batch in trainer.fold([*batches(step)]):
            passes(step, "forward", trainer.generation.number)
            if striker is not None:
                striker.begin(step)
            layers(batch).float().square().mean().backward()
            gradients = [one.grad for one in layers.parameters() if one.grad is not None]
            if records and len(gradients) == len(list(layers.parameters())):
                raw = b"".join(one.float().cpu().numpy().tobytes() for one in gradients)
                found = hashlib.sha256(raw).hexdigest()[:16]
                report(f"got {trainer.generation.number} {step} {trainer.shard} {found}")
        prepare(layers)
        if trainer.commit() and records:
            report(f"committed {step}")
            passes(step, "committed", trainer.generation.number)
    report(f"digest {digest(layers, optimizer, schedule)}")
    report(f"audited {trainer.audited}")
    return 0


def rank_of(*given: Any, **options: Any) -> Callable[[Report], int]:
    """Return a rank's function, with these arguments of `train`."""
    return lambda report: train(report, *given, **options)


# --- planned runs ---------------------------------------------------------------------------------


class DeathInRepeat:
    """The process at `seat` dies when it computes something in the first generation after 0."""

    def __init__(self, seat: int) -> None:
        self._death = Death(seat, 0, "forward")

    def __call__(self, step: int, moment: str, generation: int) -> None:
        """Send this process the signal if it is the time."""
        if generation == 1:
            replace(self._death, step=step)(step, moment)


def unrepeatable(report: Report) -> int:
    """Train as a rank with a kernel that gives other bits each time."""
    turn = itertools.count(int(os.environ["RANK"]), 100)  # no two ranks get the same
    right = torch.Tensor.square

    def square(tensor: Tensor) -> Tensor:
        return right(tensor) * (1 + next(turn) * 2**-12)

    torch.Tensor.square = square  # type: ignore[assignment, method-assign]
    return train(report)


def deaths(*all_of_them: Death) -> Callable[[int, str, int], None]:
    """Return the function that lets ranks die at these moments."""

    def passes(step: int, moment: str, generation: int) -> None:
        for death in all_of_them:
            death(step, moment)

    return passes


def planned() -> dict[str, Any]:
    """Make all runs of `test_audit.py`, and return what came of them."""
    once = {place: Fault(place, seat=1, step=2, turn=1, element=3) for place in PLACES}
    # Its highest exponent bit: whatever the number is, it isn't that now.
    stuck = {place: replace(fault, stuck=1) for place, fault in once.items()}
    outcomes = {f"{place} flips": run(3, target=rank_of(one)) for place, one in once.items()}
    outcomes |= {f"{place} sticks": run(3, target=rank_of(one)) for place, one in stuck.items()}
    outcomes["two ranks, flips"] = run(2, target=rank_of(once["gradient"]))
    outcomes["two ranks, sticks"] = run(2, target=rank_of(stuck["gradient"]))
    for name, seat in (("another dies", 3), ("the culprit dies", 1)):
        passes = DeathInRepeat(seat)
        outcomes[name] = run(4, target=rank_of(stuck["activation"], passes))
    some = deaths(Death(1, 2, "forward"), Death(0, 5, "committed"), Death(2, 7, "forward"))
    # Otherwise all three could have died before a newcomer has their state.
    waits = (4, 7, STEPS - 3)
    outcomes["clean"] = run(3, target=rank_of(None, some, audit=0.5, waits=waits))
    outcomes["unrepeatable"] = run(3, target=unrepeatable)
    outcomes["one rank"] = run(1, target=rank_of())
    return {"one process": in_one_process(), **{name: asdict(o) for name, o in outcomes.items()}}


# --- random faults --------------------------------------------------------------------------------


def disagreements(outcome: Outcome) -> int:
    """Return how many micro-batches two ranks computed for one attempt, with other gradients.

    The hashes are those of the script, not of the trainer.
    """
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for lines in outcome.reports.values():
        for _, *key, value in [one.split() for one in lines if one.startswith("got")]:
            found[tuple(key)].add(value)
    return sum(len(values) > 1 for values in found.values())


def random_faults(num_faults: int, seed: int) -> int:
    """Print what became of random faults. Return 1 if one was missed, or blamed on another rank."""
    right, bad = in_one_process(), 0
    print("| | faults | changed an audited gradient | found | culprit right | same weights |")
    print("|---|---|---|---|---|---|", flush=True)
    for kind in ("flips once", "sticks"):
        for place in PLACES:
            counts: Counter[str] = Counter()
            number = num_faults // len(PLACES) + (PLACES.index(place) < num_faults % len(PLACES))
            for index in range(number):
                rng = random.Random(f"{seed}.{kind}.{place}.{index}")
                fault = Fault(
                    place=place,
                    seat=rng.randrange(3),
                    step=rng.randrange(8),
                    turn=rng.randrange(4),
                    tensor=rng.randrange(4),
                    element=rng.randrange(1 << 20),
                    bit=rng.randrange(32),
                    stuck=None if kind == "flips once" else rng.randrange(2),
                )
                outcome = run(3, target=rank_of(fault, audit=0.5))
                changed, found = disagreements(outcome) > 0, bool(outcome.convicted)
                culprit = [*outcome.convicted] == [fault.seat]
                same = {*outcome.digests} == {right}
                counts += Counter(changed=changed, found=found, culprit=culprit, same=same)
                wrong = changed != found or found != culprit or {*outcome.statuses} != {0}
                if wrong:
                    bad += 1
                    print(f"{fault}: {outcome.statuses} {outcome.convicted} {outcome.interrupts}")
            names = ("changed", "found", "culprit", "same")
            cells = " | ".join(str(counts[name]) for name in names)
            print(f"| {place} {kind} | {number} | {cells} |", flush=True)
    return 1 if bad else 0


# --- long runs ------------------------------------------------------------------------------------


def clean(num_steps: int) -> int:
    """Make a run of three ranks without a fault. Return 1 if it isn't as one process's."""
    began = time.monotonic()
    outcome = run(3, target=rank_of(audit=0.01, num_steps=num_steps, records=False))
    took_s = time.monotonic() - began
    said = [line for lines in outcome.reports.values() for line in lines]
    print(f"{num_steps} steps in {took_s:.0f} s: {said}, {outcome.interrupts} {outcome.convicted}")
    same = {*outcome.digests} == {in_one_process(num_steps)}
    print(f"the digest of one process: {same}")
    return 0 if same and not outcome.convicted and not outcome.interrupts else 1


def cost(num_steps: int) -> int:
    """Print how long steps of two ranks take with audits and without, in turns of ten."""

    def rank(report: Report) -> int:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)])
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4)
        trainer = entrenar_py.elastic(layers, optimizer, micro_batches=8, audit=0.01)
        data = [*torch.randn(8, 192, 512)]
        began = time.perf_counter()
        for step in trainer.steps(num_steps):
            trainer._audit._audited = 0.01 if step // 10 % 2 else 0.0
            before = trainer.audited
            for part in trainer.fold(data):
                layers(part).square().mean().backward()
            trainer.commit()
            now = time.perf_counter()
            report(f"took {step // 10 % 2} {trainer.audited - before} {now - began}")
            began = now
        return 0

    outcome = run(2, target=rank)
    lines = [line.split()[1:] for line in next(iter(outcome.reports.values()))][2:]
    steps = [(int(on), int(audited), float(took)) for on, audited, took in lines]
    usual = [took for _, audited, took in steps if not audited]
    extra = []  # compared with the steps around it, as other programs may run
    for at, (_, audited, took) in enumerate(steps):
        near = [other for _, is_audited, other in steps[max(0, at - 5) : at + 6] if not is_audited]
        if audited:
            extra.append(took / median(near) - 1)
    share = len(extra) / sum(on for on, *_ in steps)
    print(f"{len(usual)} steps without an audit: {1e3 * median(usual):.0f} ms")
    print(f"{len(extra)} with one: {median(extra):.1%} more time than the steps around it,")
    print(f"and {fmean(extra):.1%} in the mean; {share:.2%} of the steps at 1 % are such")
    print(f"so 1 % costs {share * median(extra):.2%}, and {share * fmean(extra):.2%} in the mean")
    means = [fmean(took for on, _, took in steps if on == which) for which in (0, 1)]
    print(
        f"mean of all steps: {1e3 * means[0]:.1f} ms without, {1e3 * means[1]:.1f} ms with audits"
    )
    return 0


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    if name == "planned":
        print(json.dumps(planned()))
    elif name in ("clean", "cost"):
        sys.exit((clean if name == "clean" else cost)(int(numbers[0])))
    else:
        sys.exit(random_faults(int(name), int(numbers[0]) if numbers else 0))
