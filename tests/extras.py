"""Libraries of extras that a module of tests needs, found without loading them.

Each process that collects tests would load them, for seconds, and few run such a test.
"""

from __future__ import annotations

import importlib.util

import pytest


def require(*libraries: str) -> None:
    """Skip the module that is being collected, unless these libraries are installed."""
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
