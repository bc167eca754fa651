"""`--bind` and `--suggest` on the command line, with a contract whose words no check knows."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.command_line import check, report, verdicts

CONTRACT = """\
metadata: {version: "1.0", references: [a book]}
equations:
  mean: {formula: m = sum / n}
proof_obligations:
  - {type: invariant, property: Replicas agree, formal: "w(i) == w(j)", tolerance: 0}
  - {type: bound, property: Fast enough, formal: "t < 1 s"}
falsification_tests:
  - id: FALSIFY-X-001
    rule: mean
    prediction: with two workers the output is the mean of both
    if_fails: a division is missing
qa_gate: {id: G-1, name: gate, checks: [FALSIFY-X-001, "Replicas agree"]}
"""
BINDINGS = """\
entrenar_bindings: 1
contract: theirs-v1
bindings:
  - obligation: Replicas agree
    check: replica_identity
    severity: P0
    systems: [reference, mesh_simulated]
    scenarios: [SCENARIO]
    reason: after every step the weights of all workers are compared
  - obligation: Fast enough
    not_tried: no check measures time
  - test: FALSIFY-X-001
    check: reduction_mean
    severity: P2
    tolerance: 1.0e-6
    tolerance_kind: absolute
    scenarios: [VECTORS]
    options: {block_bytes: 8}
    reason: the mean of known vectors is compared with float64
"""
SCENARIO = "{workload: linear, world_size: 2, num_shards: 2, num_samples: 8, batch_size: 4}"
VECTORS = "{system: mesh_simulated, workload: vectors, world_size: 2, num_shards: 2}"


@pytest.fixture
def bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("theirs-v1.yaml").write_text(CONTRACT)
    path = tmp_path / "ours.yaml"
    path.write_text(BINDINGS.replace("SCENARIO", SCENARIO).replace("VECTORS", VECTORS))
    return path


def test_bound_statements_are_tried_and_the_others_say_how(bindings: Path) -> None:
    """Without bindings nothing is compared; with them the bound statements are, and the gate
    passes.
    """
    run = ("--contract", "theirs-v1.yaml", "--examples", 0, "--json", "r.json", "--no-color")
    assert check(*run) == 4
    before = report(Path("r.json"))
    assert {one["verdict"] for one in before["results"]} == {"inconclusive"}
    assert all("--suggest" in one["reason"] for one in before["results"])
    assert before["gate"]["passed"] is not True
    assert check(*run, "--bind", bindings) == 4
    after = report(Path("r.json"))
    assert verdicts(Path("r.json")) == {
        "FALSIFY-X-001": "held",
        "replicas-agree": "held",
        "fast-enough": "inconclusive",
    }
    reasons = {one["id"]: one["reason"] for one in after["results"]}
    assert reasons["fast-enough"] == "nothing was compared: no check measures time"
    notes = {one["id"]: one["notes"] for one in after["results"]}
    assert "its binding: severity P2 instead of the test's P1" in notes["FALSIFY-X-001"]
    assert after["gate"]["passed"] is True
    assert check(*run, "--bind", bindings, "--exclude", "fast-enough") == 0


def test_a_binding_is_of_the_systems_that_it_names(bindings: Path) -> None:
    """On another system the statement does not apply, and the reason names its systems."""
    Path("theirs-v1.bindings.yaml").write_text(bindings.read_text())
    run = ("--contract", "theirs-v1.yaml", "--examples", 0, "--json", "r.json", "--no-color")
    check(*run, "--system", "ring_simulated", "--only", "replicas-agree")
    told = report(Path("r.json"))["why_not_applying"]
    assert told == {"replicas-agree": "its binding is for reference, mesh_simulated only"}


def test_suggest_drafts_what_is_not_bound(
    bindings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each drafted binding is marked as a guess, and none is already in a file.

    The file of bindings may exist and be empty, as in `--suggest > theirs-v1.bindings.yaml`.
    """
    Path("theirs-v1.bindings.yaml").touch()
    assert check("--contract", "theirs-v1.yaml", "--suggest") == 0
    draft = capsys.readouterr().out
    assert draft.count("guess: ") == 4
    assert check("--contract", "theirs-v1.yaml", "--suggest", "--bind", bindings) == 0
    assert capsys.readouterr().out.count("guess: ") == 1
    Path("draft.yaml").write_text(draft)
    assert check("--contract", "theirs-v1.yaml", "--bind", "draft.yaml", "--list") == 2
    assert "draft.yaml:9:5: error: binding of Replicas agree: is still a guess" in (
        capsys.readouterr().err
    )


def test_a_pipe_of_bindings_serves_one_contract(
    bindings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe can be read once, so for several contracts a file is demanded and nothing hangs."""
    os.mkfifo("pipe")
    two = ("--contract", "theirs-v1.yaml", "--contract", "reduction-v1", "--bind", "pipe")
    assert check(*two, "--list") == 2
    assert "--bind pipe: is a pipe, which can be read once, and 2 contracts need it" in (
        capsys.readouterr().err
    )
    writer = threading.Thread(target=Path("pipe").write_bytes, args=(bindings.read_bytes(),))
    writer.start()
    assert check("--contract", "theirs-v1.yaml", "--bind", "pipe", "--list") == 0
    writer.join()
