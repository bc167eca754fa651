"""Certificate authorities, made once for all tests of connections."""

from __future__ import annotations

import pytest

from tests.train.wire_io.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that both ends trust."""
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the ends do not trust."""
    return Authority(tmp_path_factory.mktemp("tls"), "stranger")
