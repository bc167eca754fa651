"""What tests of several rooms of the trainer use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.finetune.strategies import runs


@pytest.fixture(scope="session")
def llama(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four blocks with a head that is not its table of tokens."""
    return runs.llama(small, tmp_path_factory.mktemp("llama") / "model")
