"""Addresses are parsed, or refused with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.service import address
from entrenar_py.train.service.address import Address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:7411", Address("127.0.0.1", 7411)),
        ("trainer.example:1", Address("trainer.example", 1)),
        ("[::1]:65535", Address("::1", 65535)),
        (" [fd00::5%eth0]:7411 ", Address("fd00::5%eth0", 7411)),
    ],
)
def test_an_address_reads_as_it_is_written(text: str, expected: Address) -> None:
    """Names and numbers of both families are parsed and formatted again unchanged."""
    assert address.parse(text, port_min=1) == expected
    assert str(expected) == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("127.0.0.1", "use host:port"),
        (":7411", "use host:port"),
        ("::1:7411", "use host:port"),
        ("[::1]", "use host:port"),
        ("host:port", "use host:port"),
        ("host:-1", "use host:port"),
        ("", "use host:port"),
        ("host:0", "port 0: use 1 to 65535"),
        ("host:65536", "port 65536: use 1 to 65535"),
        ("trainer..example:7411", "not a valid host name"),
        (".:7411", "not a valid host name"),
    ],
)
def test_what_is_no_address_is_refused(text: str, message: str) -> None:
    """The message quotes the text and shows examples of addresses."""
    with pytest.raises(UsageError) as caught:
        address.parse(text, port_min=1)
    assert message in str(caught.value)
    assert repr(text) in str(caught.value)


def test_a_label_that_is_too_long_is_refused() -> None:
    """The message quotes a part of the name."""
    with pytest.raises(UsageError, match="not a valid host name") as caught:
        address.parse("a" * 70_000 + ":80", port_min=1)
    assert len(str(caught.value)) < 2000


def test_any_free_port() -> None:
    """Port 0 is only allowed for listening."""
    assert address.parse("localhost:0", port_min=0) == Address("localhost", 0)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    """Any text is parsed or raises UsageError."""
    try:
        found = address.parse(text, port_min=1)
    except UsageError:
        return
    assert found.host
    assert 1 <= found.port <= address.PORT_MAX
