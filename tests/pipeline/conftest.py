"""What several tests of layer pipelines use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.finetune.strategies import runs
from tests.service.cluster import Cluster, cluster


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Cluster]:
    """Processes that are ended with the test."""
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def llama(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four blocks, whose head is not its table of tokens."""
    return runs.llama(small, tmp_path_factory.mktemp("llama") / "model")
