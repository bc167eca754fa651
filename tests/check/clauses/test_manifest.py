"""F-HET-001: the judge's findings on equal, different and missing manifests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.clauses.backends import judge_manifests, plan_manifests
from entrenar_py.check.contract import Invariant
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, End, Event, Manifest, Trace
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses.traces import several

INVARIANT = Invariant(
    id="F-HET-001",
    name="manifest",
    statement="identical on every backend",
    position=Position("c.yaml", 1, 1),
)
WEIGHT, BIAS = ("weight", (3, 2), "float32"), ("bias", (3,), "float32")
ON_CPU = Manifest(backend="cpu", entries=(WEIGHT, BIAS))
ON_WGPU = Manifest(backend="wgpu", entries=(WEIGHT, BIAS), device="llvmpipe", software=True)
NO_CUDA = Attempt(backend="cuda", served=False, reason="no driver")


def trace(*events: Event, status: str = "completed") -> Trace:
    scenario = Scenario(system="manifest", workload="mlp", world_size=1, seed=0)
    end = End(status=status, reason="it crashed" if status == "failed" else "")
    return Trace(scenario=scenario, environment={}, promises=(), events=(*events, end))


def test_equal_manifests_hold() -> None:
    """Equal manifests hold; a skipped backend and a software adapter are named."""
    finding = judge_manifests(INVARIANT, several([trace(ON_CPU, ON_WGPU, NO_CUDA)]))
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 4)
    assert finding.notes == ("skipped: cuda (no driver)", "software adapter llvmpipe")


def test_the_models_word_is_no_backend() -> None:
    """The model's manifest is compared first wherever it stands, and is no backend's."""
    declared = replace(ON_CPU, backend="model")
    held = judge_manifests(INVARIANT, several([trace(ON_CPU, ON_WGPU, declared)]))
    assert (held.verdict, held.compared) == (Verdict.HELD, 6)
    alone = judge_manifests(INVARIANT, several([trace(declared, ON_CPU)]))
    assert "given: cpu; skipped: none" in alone.reason
    both = [replace(manifest, entries=(WEIGHT,)) for manifest in (ON_CPU, ON_WGPU)]
    finding = judge_manifests(INVARIANT, several([trace(declared, *both)]))
    assert finding.reason == "gradient 1 on cpu is not the one on model"


@pytest.mark.parametrize(
    ("entries", "position", "tensor"),
    [
        ((BIAS, WEIGHT), 0, "weight"),
        ((WEIGHT, ("bias", (3, 1), "float32")), 1, "bias"),
        ((WEIGHT, ("bias", (3,), "float64")), 1, "bias"),
        ((("Weight", (3, 2), "float32"), BIAS), 0, "weight"),
        ((WEIGHT,), 1, "bias"),
        ((WEIGHT, BIAS, ("scale", (1,), "float32")), 2, "scale"),
    ],
)
def test_different_manifests_are_falsified(
    entries: tuple[tuple[str, tuple[int, ...], str], ...], position: int, tensor: str
) -> None:
    """Order, shape, dtype, name, and length each falsify; the first difference is named."""
    finding = judge_manifests(
        INVARIANT, several([trace(ON_CPU, replace(ON_WGPU, entries=entries))])
    )
    assert finding.verdict is Verdict.FALSIFIED
    assert finding.reason == f"gradient {position} on wgpu is not the one on cpu"
    assert finding.counterexample is not None
    assert finding.counterexample.tensor == tensor


def test_no_gradients_at_all_is_falsified() -> None:
    """Two empty manifests are equal but falsified, since no gradient was produced."""
    empty = [replace(manifest, entries=()) for manifest in (ON_CPU, ON_WGPU)]
    finding = judge_manifests(INVARIANT, several([trace(*empty)]))
    assert finding.reason == "cpu produced no gradient at all"


@pytest.mark.parametrize(
    ("traces", "reason"),
    [
        ([], "no gradient manifest was recorded"),
        ([trace(ON_CPU, NO_CUDA)], "given: cpu; skipped: cuda (no driver)"),
        ([trace()], "given: none; skipped: none"),
        ([trace(status="failed")], "it crashed"),
        ([trace(ON_CPU, ON_WGPU), trace(ON_CPU)], "two backends are needed"),
    ],
)
def test_too_few_backends_are_inconclusive(traces: list[Trace], reason: str) -> None:
    """Fewer than two backends in a run are inconclusive, and skipped backends are named."""
    finding = judge_manifests(INVARIANT, several(traces))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert reason in finding.reason


def test_plan_covers_every_workload() -> None:
    """The plan has every workload's gradient on every backend."""
    assert [s.workload for s in plan_manifests(INVARIANT)] == ["linear", "mlp", "decoder"]
    assert {s.backends for s in plan_manifests(INVARIANT)} == {("cpu", "wgpu", "cuda")}
