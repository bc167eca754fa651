"""Workers read the settings that a coordinator sends them, whatever its own file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.train.finetune import serving, settings_file
from tests.train.finetune import runs

STAGES = {
    "data": {"validation_share": 0.0},
    "strategy": "layer_pipeline",
    "coordinator": {"listen": "127.0.0.1:7411", "secret_file": "secret"},
    "stages": [{"layers": [0, 1], "backend": "cpu"}, {"layers": [1, 2], "backend": "cpu"}],
}
VALIDATED = {"validation": "rows.jsonl", "validation_share": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate_every": 10},
        {"evaluate_every": 10, "data": VALIDATED},
        {"data": {"on_error": "skip"}},
        {"recompute": "blocks"},
        {"precision": "bfloat16"},
        {"workers": 3},
        STAGES,
        {"method": "qlora"},
    ],
    ids=str,
)
def test_shared_settings_are_read_again(
    changes: dict[str, Any], small: Path, tmp_path: Path
) -> None:
    settings = settings_file.load(runs.configured(tmp_path, small, **changes))
    shared = serving.shared_settings(settings)
    found = settings_file.of_text(json.dumps(shared), "the settings")
    assert (found.method, found.precision) == (settings.method, settings.precision)
    assert found.recompute == settings.recompute
    assert not found.data.validates
