"""Addresses: all of a name at one port, without those that this machine lacks."""

from __future__ import annotations

import asyncio
import socket

import pytest

from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.sockets import Address
from tests.train.wire_io.fakes import LOOPBACK, free_port, go

HERE: Address = (socket.AF_INET, (LOOPBACK, 0))
ALSO_HERE: Address = (socket.AF_INET, ("127.0.0.2", 0))
ELSEWHERE: Address = (socket.AF_INET, ("192.0.2.1", 0))  # kept for documentation: nobody has it


def test_one_port_for_all() -> None:
    """A free port is chosen once; an address that this machine lacks is skipped."""
    listeners = sockets.listen([ELSEWHERE, HERE, ALSO_HERE])
    names = [one.getsockname() for one in listeners]
    for one in listeners:
        one.close()
    assert [host for host, _ in names] == [LOOPBACK, "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_no_address_is_left() -> None:
    """The error has the reason for each address."""
    with pytest.raises(OSError, match=r"192\.0\.2\.1: .*Cannot assign"):
        sockets.listen([ELSEWHERE])


def test_an_address_that_is_taken() -> None:
    """An error, and listeners that were opened before are closed."""
    with socket.create_server((ALSO_HERE[1][0], 0)) as other:
        port = other.getsockname()[1]
        here, also_here = ((family, (host, port)) for family, (host, _) in (HERE, ALSO_HERE))
        with pytest.raises(OSError, match="in use"):
            sockets.listen([here, also_here])
        sockets.listen([here])[0].close()


def test_every_address_is_tried() -> None:
    """If none accepts, the error has the reason for each."""

    async def story() -> None:
        port = free_port()
        with pytest.raises(OSError, match=rf"Connect call failed \('{LOOPBACK}', {port}\)"):
            await sockets.connect("localhost", port)

    go(story())


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("192.0.2.1", False)],
)
def test_what_is_this_machine_alone(host: str, alone: bool) -> None:
    """Only loopback addresses can't be reached from other machines."""
    assert sockets.is_loopback((socket.AF_INET, (host, 0))) == alone


@pytest.mark.parametrize(("host", "alone"), [("::1", True), ("::", False), ("fe80::1%eth0", False)])
def test_the_same_of_ipv6(host: str, alone: bool) -> None:
    """An address may name its interface."""
    assert sockets.is_loopback((socket.AF_INET6, (host, 0, 0, 0))) == alone


def test_each_address_of_a_name_once() -> None:
    """Other fields of the resolver's answer don't matter."""

    async def story() -> None:
        assert await sockets.resolve(LOOPBACK, 80) == [(socket.AF_INET, (LOOPBACK, 80))]
        found = await sockets.resolve("localhost", 80)
        assert len(found) == len(set(found)) > 0
        assert all(map(sockets.is_loopback, found))

    asyncio.run(story())


@pytest.mark.parametrize("wanted", [8_192, sockets.BUFFER_BYTES])
def test_how_much_the_kernel_may_hold(wanted: int) -> None:
    """Both ends get the requested size; the kernel doubles or limits it."""

    async def story() -> None:
        (listener,) = sockets.listen([HERE], buffer_bytes=wanted)
        with listener:
            port = listener.getsockname()[1]
            there = await sockets.connect(LOOPBACK, port, buffer_bytes=wanted)
            here, _ = await asyncio.get_running_loop().sock_accept(listener)
        with there, here:
            for sock in (there, here):
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    assert 0 < sock.getsockopt(socket.SOL_SOCKET, option) <= 2 * wanted

    go(story())
