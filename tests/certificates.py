"""Authorities and certificates for tests, made when they are needed."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """The files of one certificate."""

    cert: Path
    key: Path


@cache
def authority(name: str = "ours") -> trustme.CA:
    """An authority that no system trusts."""
    return trustme.CA(organization_name=name)


def issue(folder: Path, *names: str, by: str = "ours") -> Pair:
    """A certificate for these names with its key, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    leaf = authority(by).issue_cert(*(names or ("127.0.0.1",)))
    pair = Pair(folder / "tls.crt", folder / "tls.key")
    pair.cert.write_bytes(b"".join(one.bytes() for one in leaf.cert_chain_pems))
    pair.key.write_bytes(leaf.private_key_pem.bytes())
    return pair


def ca_file(folder: Path, name: str = "ours") -> Path:
    """The file with an authority's certificate."""
    path = folder / f"{name}-ca.pem"
    path.write_bytes(authority(name).cert_pem.bytes())
    return path
