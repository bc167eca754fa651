"""Contracts for the tests of validation, written to files."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.check.contract import validation
from entrenar_py.check.contract.validation import Judged, Validation
from tests.check.contract.known import NOTHING

# A kernel's contract that keeps every rule.
KERNEL = """\
metadata:
  version: "1.0.0"
  description: what a softmax is
  references: [a paper]
equations:
  softmax:
    formula: s(x)_i = exp(x_i) / sum exp(x_j)
  shift: s(x + c) = s(x)
proof_obligations:
  - {type: invariant, property: it sums to one, formal: sum s = 1}
  - {type: equivalence, property: shifts change nothing, formal: s(x + c) = s(x)}
falsification_tests:
  - {id: FALSIFY-1, rule: it sums to one, prediction: 1 within eps, if_fails: no division}
  - {id: FALSIFY-2, rule: shifts change nothing, prediction: the same bits, if_fails: overflow}
kani_harnesses:
  - {id: KANI-1, obligation: it sums to one, bound: 8}
  - {id: KANI-2, obligation: shifts change nothing, bound: 8}
qa_gate: {id: QA-1, name: gate, checks: [FALSIFY-1]}
"""

# A contract of clauses, which are tried and not proved.
CLAUSES = """\
metadata: {version: "1.0", references: [a book]}
equations: {mean: g = sum g_i / n}
clauses:
  - {id: F-1, severity: P2, invariant: same weights}
falsification_tests:
  - {id: T-1, rule: F-1, prediction: same digests, if_fails: not synchronised}
qa_gate: {id: G-1, name: gate, checks: [F-1]}
"""


def written(folder: Path, text: str, name: str = "c-v1.yaml") -> Path:
    """Write `text` to a new file and return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def validated(path: Path, *suppressed: str, strict: bool = False) -> Validation:
    """Return the validation of one file, with a vocabulary without checks."""
    return validation.validate({path: ()}, vocabulary=NOTHING, suppressed=suppressed, strict=strict)


def judged(path: Path) -> Judged:
    """Return the only contract of a validation."""
    (contract,) = validated(path).contracts
    return contract
