"""Fixtures of the backends. One that this machine lacks is skipped with its own message."""

from __future__ import annotations

import pytest

from entrenar_py.compute import Backend, open_backend
from entrenar_py.compute.wgpu import WgpuBackend, open_wgpu
from entrenar_py.shared.errors import BackendUnavailable


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param("wgpu", marks=pytest.mark.wgpu),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    try:
        return open_backend(request.param)
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def wgpu_backend() -> WgpuBackend:
    """The wgpu backend."""
    try:
        return open_wgpu()
    except BackendUnavailable as error:
        pytest.skip(str(error))
