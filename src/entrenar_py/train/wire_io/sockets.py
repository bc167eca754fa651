"""Sockets that connect and listen by host name, and TLS 1.3 over them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import files

# The default size of the kernel's buffers: with the usual 128 KiB, a large tensor would cost
# hundreds of wake-ups. A connection without traffic doesn't use this memory.
BUFFER_BYTES = 2**22
# Seconds between attempts, at first and at most. Both are short because a worker may be sent away
# several times before it gets one of the `Places`.
BACKOFF_S = (0.05, 0.5)
# Connections that wait in the kernel: a burst of unknown clients must not keep a worker out. The
# kernel may allow fewer (net.core.somaxconn).
BACKLOG = 2**12

_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

# Family and socket address: (host, port) for IPv4, (host, port, flow, scope) for IPv6.
Address = tuple[socket.AddressFamily, tuple[Any, ...]]


async def resolve(host: str, port: int) -> list[Address]:
    """Return every distinct address of `host`. Raises OSError if it has none."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, place) for family, _, _, _, place in infos))


def is_loopback(address: Address) -> bool:
    """Return whether only this machine can connect to `address`."""
    return ipaddress.ip_address(address[1][0].partition("%")[0]).is_loopback


async def connect(
    host: str, port: int, *, patience_s: float, buffer_bytes: int = BUFFER_BYTES
) -> socket.socket:
    """Return a connection to the first address of `host` that accepts.

    The addresses have equal shares of `patience_s`, as the first may swallow packets. Raises
    OSError if none accepts, TimeoutError if the host's addresses are not found in that time.
    """
    loop, problems = asyncio.get_running_loop(), []
    async with asyncio.timeout(patience_s):
        addresses = await resolve(host, port)
    share_s = patience_s / len(addresses)
    for family, place in addresses:
        with ExitStack() as failing:
            sock = failing.enter_context(_new(family, buffer_bytes))
            try:
                async with asyncio.timeout(share_s):
                    await loop.sock_connect(sock, place)
            except OSError as error:
                problems.append(str(error) or f"no answer from {place[0]} within {share_s:g} s")
                continue
            failing.pop_all()
            return sock
    raise OSError("; ".join(problems))


async def spoken_to(sock: socket.socket, *, patience_s: float) -> None:
    """Wait until the other end has sent something, even a TLS record; leave it unread.

    Closes `sock` and raises ConnectionResetError if the other end disconnects before that, or
    TimeoutError if it sends nothing for `patience_s`.
    """
    loop = asyncio.get_running_loop()
    with ExitStack() as failing:
        failing.callback(sock.close)
        async with asyncio.timeout(patience_s):
            await ready(sock, loop.add_reader, loop.remove_reader)
        if not socket.socket.recv(sock, 1, socket.MSG_PEEK):
            raise ConnectionResetError("closed by the other end")
        failing.pop_all()


async def ready(
    sock: socket.socket, watch: Callable[..., None], unwatch: Callable[..., bool]
) -> None:
    """Wait until `sock` can be read (`watch`, `unwatch`: the loop's add_reader, remove_reader).

    With the loop's functions for writers, wait until it can be written to.
    """
    event = asyncio.Event()
    watch(sock, event.set)
    try:
        await event.wait()
    finally:
        unwatch(sock)


def listen(
    addresses: Sequence[Address], *, buffer_bytes: int = BUFFER_BYTES
) -> list[socket.socket]:
    """Return sockets that listen at `addresses`, all on the same port; 0 selects a free port.

    `buffer_bytes` is the size of the kernel's buffers of a connection, in each direction. Addresses
    that this machine doesn't have are skipped (`localhost` may resolve to one).

    Raises OSError if no address remains, or if one is in use.
    """
    listeners: list[socket.socket] = []
    problems = []
    with ExitStack() as failing:
        for family, (host, port, *scope) in addresses:
            if port == 0 and listeners:
                port = listeners[0].getsockname()[1]
            try:
                listener = _listener(family, (host, port, *scope), buffer_bytes)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                problems.append(f"{host}: {error}")
                continue
            listeners.append(failing.enter_context(listener))
        if not listeners:
            raise OSError("; ".join(problems))
        failing.pop_all()
    return listeners


def _listener(
    family: socket.AddressFamily, place: tuple[Any, ...], buffer_bytes: int
) -> socket.socket:
    with ExitStack() as failing:
        sock = failing.enter_context(_new(family, buffer_bytes))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
        sock.listen(BACKLOG)
        failing.pop_all()
        return sock


def _new(family: socket.AddressFamily, buffer_bytes: int) -> socket.socket:
    """Return a non-blocking socket. Connections accepted from it inherit its buffer sizes."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    return sock


BYTES_MAX = 2**24  # a bundle of all public CAs takes a quarter of a MiB


def server_context(*, cert: Path, key: Path, ca: Path | None = None) -> ssl.SSLContext:
    """Return a coordinator's TLS context. With a `ca`, workers need a certificate signed by it.

    All are PEM files. `cert` holds a certificate and any intermediate certificates, `key` the
    private key without a passphrase. Raises UsageError, which names the file, if one is missing or
    unusable.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no session is resumed
    _show(context, cert, key)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, ca)
    return context


def client_context(
    *, ca: Path, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Return a worker's TLS context. It trusts coordinators signed by `ca`; `cert` is its own.

    All are PEM files, as for a coordinator. The coordinator's certificate must name the host or
    address that the worker connects to.

    Raises UsageError for an unusable file, or if only one of `cert` and `key` is given.
    """
    if (cert is None) != (key is None):
        given, missing = ("key", "cert") if cert is None else ("cert", "key")
        raise UsageError(f"TLS {given} without {missing}: give both, or neither")
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, ca)
    if cert is not None and key is not None:
        _show(context, cert, key)
    return context


def proves_identity(context: ssl.SSLContext) -> bool:
    """Return whether only peers with a trusted certificate get through the handshake."""
    return context.verify_mode == ssl.CERT_REQUIRED


async def secured(
    sock: socket.socket,
    context: ssl.SSLContext,
    *,
    server_side: bool,
    host: str | None = None,
    patience_s: float,
) -> ssl.SSLSocket:
    """Return `sock` wrapped in TLS, after the handshake.

    A worker passes the coordinator's name as `host`. If the handshake fails, closes `sock` and
    raises OSError (ssl.SSLError, TimeoutError).
    """
    with ExitStack() as failing:
        failing.callback(sock.close)
        sock.getpeername()  # raises if it is reset: `ssl` would leave the file open then
        wrapped = failing.enter_context(
            context.wrap_socket(
                sock, server_side=server_side, server_hostname=host, do_handshake_on_connect=False
            )
        )
        async with asyncio.timeout(patience_s):
            await _shake_hands(wrapped)
        failing.pop_all()
    return wrapped


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            await ready(sock, loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await ready(sock, loop.add_writer, loop.remove_writer)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _show(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    _require_file("cert", cert)
    _require_file("key", key)
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"TLS cert={cert}, key={key}: {error}; use a PEM certificate and the private key that "
            "belongs to it, without a passphrase"
        ) from error


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    _require_file("ca", ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise UsageError(f"TLS ca={ca}: {error}; use PEM certificates") from error


def _require_file(name: str, path: Path) -> None:
    try:
        files.open_file(path, bytes_max=BYTES_MAX).close()
    except OSError as error:
        raise UsageError(f"TLS {name}={path}: {error.strerror}; use a PEM file") from error


def _no_passphrase() -> str:
    """Raise ValueError for an encrypted key, for which OpenSSL would prompt otherwise."""
    raise ValueError("the key is encrypted")
