"""An open adapter for the tests that need one."""

from __future__ import annotations

import pytest

from entrenar_py.compute.wgpu.device import Device, open_device
from entrenar_py.shared.errors import BackendUnavailable


@pytest.fixture(scope="session")
def device() -> Device:
    """Open the best adapter of this machine."""
    try:
        return open_device(0)
    except BackendUnavailable as error:
        pytest.skip(str(error))
