"""The address at which a coordinator listens: `host:port`, an IPv6 host in brackets."""

from __future__ import annotations

import re
from typing import NamedTuple

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping

PORT_MAX = 2**16 - 1

_FORM = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str, *, port_min: int) -> Address:
    """Return the address in `text`. Raises UsageError, which says what is wrong with it.

    `port_min` is 0 for an address to listen at (port 0 selects a free port), 1 for an address to
    connect to.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"address={text!r}: use host:port, e.g. trainer.example:7411, 10.0.0.5:7411 or "
            "[fd00::5]:7411"
        )
    port = int(match["port"])
    if not port_min <= port <= PORT_MAX:
        raise UsageError(f"address={text!r}: port {port}: use {port_min} to {PORT_MAX}")
    host = match["bracketed"] or match["plain"]
    try:
        host.encode("idna")  # as the resolver will do
    except UnicodeError as error:
        shown = escaping.shortened(text)
        raise UsageError(
            f"address={shown!r}: not a valid host name ({error}); give a DNS name or an IP address"
        ) from error
    return Address(host, port)
