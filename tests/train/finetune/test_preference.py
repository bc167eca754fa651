"""Runs of `entrenar finetune` on pairs: the same bits for any workers, and their scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def trained(folder: Path, small: Path, workers: int) -> Path:
    output = f"out{workers}"
    config = runs.of_pairs(folder, small, workers=workers, output=output)
    assert cli.main(["finetune", str(config)]) == exit_codes.DONE
    return folder / output


def test_the_same_adapters_for_any_workers_and_the_safe_command_is_preferred(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One worker, and three of which one is killed, with dropout in the adapters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = trained(tmp_path, small, 1)
    told = capsys.readouterr().out
    runs.kill_one(monkeypatch)
    three = trained(tmp_path, small, 3)
    assert "worker 1 died (SIGKILL)" in capsys.readouterr().out
    assert runs.adapters(one) == runs.adapters(three)

    first, *_, last = runs.told(one, "step")
    assert first["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert last["loss"] < 0.5 * first["loss"]
    scored = runs.told(one, "evaluation")
    assert [event["step"] for event in scored] == [6, 12, 18, 24]
    assert scored[-1]["weight"] == runs.NUM_PAIRS // 4
    assert scored[-1]["accuracy"] == 1.0
    assert scored[-1]["margin"] > scored[0]["margin"] > 0
    assert scored[-1]["perplexity"] is None
    loss, margin = scored[-1]["loss"], scored[-1]["margin"]
    assert (
        f"validation: loss {loss:.4f}, 4 of 4 right\nvalidation: mean margin {margin:.4f}" in told
    )
    page = (one / "report.html").read_text(encoding="utf-8")
    assert "Mean margin" in page

    evaluated = ["eval", str(one), "--data", str(tmp_path / "rows.jsonl")]
    assert cli.main(evaluated) == exit_codes.DONE
    assert f"of {runs.NUM_PAIRS} right" in capsys.readouterr().out
    assert cli.main(["infer", str(one), "--prompt", "list", "--new-tokens", "2"]) == exit_codes.DONE
