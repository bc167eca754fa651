"""A certificate authority for tests, and certificates that it signs."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from entrenar_py.train.wire_io import sockets

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Identity:
    """The files of one end: its certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority; `ca` is the file of its certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        own = self._certificate(name, self._key.public_key(), x509.BasicConstraints(True, None))
        self.ca.write_bytes(own)

    def signed(self, name: str, host: str = "127.0.0.1") -> Identity:
        """Return the files of an end with this name, at IP address `host`."""
        key = ec.generate_private_key(ec.SECP256R1())
        at = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        identity = Identity(self._folder / f"{name}-cert.pem", self._folder / f"{name}-key.pem")
        identity.cert.write_bytes(self._certificate(name, key.public_key(), at))
        identity.key.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        return identity

    def locked_key(self) -> Path:
        """Return the file of a private key with a passphrase."""
        path = self._folder / "locked.pem"
        lock = BestAvailableEncryption(b"passphrase")
        path.write_bytes(self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
        return path

    def _certificate(
        self, name: str, key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def server_context(authority: Authority, *, mutual: bool = True) -> ssl.SSLContext:
    """Return the context of a coordinator that all trust."""
    own = authority.signed("coordinator")
    ca = authority.ca if mutual else None
    return sockets.server_context(cert=own.cert, key=own.key, ca=ca)


def client_context(trusted: Authority, signed_by: Authority | None) -> ssl.SSLContext:
    """Return the context of a worker."""
    if signed_by is None:
        return sockets.client_context(ca=trusted.ca)
    own = signed_by.signed("worker")
    return sockets.client_context(ca=trusted.ca, cert=own.cert, key=own.key)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
