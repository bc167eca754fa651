"""A small checkpoint with commands to classify, made once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune" / "make_small.py"


@pytest.fixture(scope="session")
def make_small() -> ModuleType:
    """Return the example that makes a small checkpoint."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("make_small", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small(make_small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model`, `train.jsonl` and `test.jsonl`."""
    folder = tmp_path_factory.mktemp("small")
    make_small.make(folder)
    return folder
