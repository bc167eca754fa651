"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A timing is a benchmark, never a test: a slow machine must not fail one.
settings.register_profile("entrenar", deadline=None)
settings.load_profile("entrenar")
