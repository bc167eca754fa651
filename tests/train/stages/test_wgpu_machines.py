"""Stages on wgpu as processes of their own: but for rounding, the adapters of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.compute import open_backend
from entrenar_py.shared.errors import BackendUnavailable
from tests.train.service.cluster import Cluster
from tests.train.stages import mixed

pytestmark = [
    pytest.mark.wgpu,
    # peft asks for what a later transformers will lack.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(autouse=True)
def needs_an_adapter() -> None:
    """Skip without an adapter."""
    try:
        open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("names", "alone"),
    [
        (("cpu", "wgpu"), "cpu"),
        pytest.param(("wgpu", "wgpu"), "wgpu", marks=pytest.mark.by_hand),
    ],
)
def test_stages_train_the_adapters_of_one_process(
    machines: Cluster,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, str],
    alone: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    trained = small / "model"
    stages = [(name, 1) for name in names]
    losses = mixed.by_stages(machines, small, trained, tmp_path, stages)
    assert losses == pytest.approx(mixed.alone(small, trained, tmp_path, alone), rel=mixed.LOSS)
    assert mixed.apart(tmp_path) <= mixed.APART
