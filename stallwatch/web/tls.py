"""Certificates of our own listener.

Every connection is given the newest context, so replaced files need neither a restart nor the end of open connections.
"""

import ssl
import time
from pathlib import Path

from stallwatch.settings import WebSettings
from stallwatch.web.reloading import Clock, Reloading

Certificates = Reloading[ssl.SSLContext]


def certificates_for(settings: WebSettings, *, clock: Clock = time.monotonic) -> Certificates | None:
    """What these settings say of TLS, or None. Raises `OSError` or `ValueError` when a file cannot be used."""
    cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.client_ca_file
    if cert is None or key is None:
        return None
    paths = [cert, key] if client_ca is None else [cert, key, client_ca]
    return Reloading(paths, lambda: server_context(cert, key, client_ca), clock=clock)


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """A context of TLS 1.2 or later. Raises `OSError` (which `ssl.SSLError` is) or `ValueError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key, password=_no_password)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal and wait.
    raise ValueError("the private key is encrypted")
