"""TLS between the hosts of one run, without an authority: one self-made certificate, which everybody trusts alone.

The supervisor makes it, its agents get it with their settings and serve under it as well; it lives as long as the run.
Who holds the key holds the token, too. On loopback there is no TLS (`http://`), elsewhere nothing else.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DAYS_VALID = 365 * 10
"""Longer than any run: a certificate that runs out in the middle of one would stop it."""
CLOCK_SKEW_DAYS = 2
NAME = "orchestrator run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A certificate and its key, as PEM texts."""

    certificate: str
    key: str = field(repr=False)


def new_identity(host: str | None = None) -> Identity:
    """A certificate of its own (P-256), for this run alone; or for a host of that name, for clients that look at it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=CLOCK_SKEW_DAYS))
        .not_valid_after(now + datetime.timedelta(days=DAYS_VALID))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    if host is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    return Identity(
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
    )


def _alternative(host: str) -> Any:
    from ipaddress import ip_address

    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def server_context(identity: Identity | None) -> ssl.SSLContext | None:
    """For a port of this run; None: it stays on loopback."""
    if identity is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:  # mode 0700; the ssl module takes a key from a file only
        path = Path(folder) / "identity.pem"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(identity.key + identity.certificate)
        context.load_cert_chain(path)
    return context


def client_context(certificate: str | None) -> ssl.SSLContext | None:
    """Trusts this certificate and no other, whatever name the host has; None: the port is on loopback."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is known, and hosts of a cluster have many names
    context.load_verify_locations(cadata=certificate)
    return context


def url_of(address: str, port: int, identity: Identity | None) -> str:
    """The URL of a port of this run, at the address by which others reach it."""
    host = f"[{address}]" if ":" in address else address
    return f"{'http' if identity is None else 'https'}://{host}:{port}"
