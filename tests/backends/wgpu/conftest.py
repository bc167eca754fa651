"""An open adapter for all tests of what runs on one."""

from __future__ import annotations

import pytest

from entrenar_py.backends.wgpu.device import Device, open_device
from entrenar_py.errors import BackendUnavailable


@pytest.fixture(scope="session")
def device() -> Device:
    """The best adapter of this machine."""
    try:
        return open_device(0)
    except BackendUnavailable as error:
        pytest.skip(str(error))
