"""What several tests of layer pipelines use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from tests.train.finetune.runs import adapters
from tests.train.service.cluster import Cluster, cluster
from tests.train.stages.test_machines import configured

# 24 steps: one for each death, and none is killed near the end, which may be over before it is.
EPOCHS = 4
Undisturbed = Callable[[int], bytes]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Cluster]:
    """Processes that are ended with the test."""
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(small: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function of a number of epochs: the adapters that one process trains in them."""

    @cache
    def trained(epochs: int) -> bytes:
        folder = tmp_path_factory.mktemp("alone")
        configured(folder, small, llama, training={"epochs": epochs})
        assert cli.main(["finetune", str(folder / "run.yaml")]) == exit_codes.DONE
        return adapters(folder / "out")

    return trained
