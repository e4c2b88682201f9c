"""Certificates of servers in tests, and how they become trusted."""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAME = "files.invalid"
"""A host that certificates are for, as for 127.0.0.1."""


def trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """What a server speaks TLS with, whose certificate is trusted here."""
    path = _certificate(folder / "own.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.load_cert_chain(path)
    return found


def _certificate(path: Path) -> Path:
    """Write a key and its certificate."""
    key, nobody, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.now()
    made = x509.CertificateBuilder(nobody, nobody, key.public_key(), 1, now - timedelta(2), now + timedelta(2))
    hosts = [x509.DNSName(NAME), x509.IPAddress(ip_address("127.0.0.1"))]
    signed = made.add_extension(x509.SubjectAlternativeName(hosts), True).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(plain + signed.public_bytes(pem))
    return path
