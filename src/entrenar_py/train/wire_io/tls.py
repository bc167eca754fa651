"""TLS for a connection, version 1.3 only: contexts from files, and the handshake.

An end with a `ca` requires that the other end shows a certificate signed by it. A coordinator
without one accepts any worker that knows the run's secret.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import files
from entrenar_py.train.wire_io import sockets

BYTES_MAX = 2**24  # a bundle of all public CAs has a quarter of a MiB


def server_context(*, cert: Path, key: Path, ca: Path | None = None) -> ssl.SSLContext:
    """Return a coordinator's context; with `ca` workers must show a certificate that it signed.

    All are PEM files. `cert` holds a certificate and any intermediate ones, `key` its private key
    without a passphrase. UsageError, naming the file, if one is missing or unfit.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no session is taken up again
    _show(context, cert, key)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, ca)
    return context


def client_context(
    *, ca: Path, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Return a worker's context: it trusts coordinators signed by `ca`, and shows `cert` if given.

    All are PEM files, as for a coordinator. The coordinator's certificate must name the host or
    address that the worker connects to.

    Raises UsageError for an unfit file, or if only one of `cert` and `key` is given.
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
    """Return `sock` wrapped in TLS, after the handshake. A worker gives the coordinator's name as
    `host`.

    Raises OSError (ssl.SSLError, TimeoutError), and closes `sock` then.
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
            await sockets.ready(sock, loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await sockets.ready(sock, loop.add_writer, loop.remove_writer)


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
