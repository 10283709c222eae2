"""Who may ask: tokens and passwords as their files hold them.

Passwords are kept as scrypt hashes, which the standard library can check: the usual bcrypt would be a dependency. No
message says anything of a line but its number. Loaded by short commands, so it imports only the standard library.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# 16 MiB and a fifth of a second or so: the cost that OWASP's cheat sheet gives for this much memory.
COST, BLOCK, PARALLEL = 2**14, 8, 5

MEMORY_MAX = 128 * 1024 * 1024
_COST_MAX = 128 * COST * BLOCK * PARALLEL // 5  # of n*r*p: some seven seconds
_BCRYPT = re.compile(r"\$2[abxy]?\$")


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """One scrypt hash; written `scrypt$n$r$p$salt$hash`, the last two in base64."""

    n: int
    r: int
    p: int
    salt: bytes
    digest: bytes

    def __str__(self) -> str:
        salt, digest = (base64.b64encode(part).decode("ascii") for part in (self.salt, self.digest))
        return f"scrypt${self.n}${self.r}${self.p}${salt}${digest}"

    def matches(self, password: bytes) -> bool:
        """Whether this is the password. Takes long, without holding the interpreter."""
        tried = _scrypt(password, self.salt, self.n, self.r, self.p, len(self.digest))
        return hmac.compare_digest(tried, self.digest)

    def decoy(self) -> "PasswordHash":
        """A hash of the same cost that no password has."""
        return PasswordHash(self.n, self.r, self.p, secrets.token_bytes(16), secrets.token_bytes(len(self.digest)))


def hash_password(password: str, *, n: int = COST) -> PasswordHash:
    """A hash with fresh salt; `n` is lower only in tests."""
    salt = secrets.token_bytes(16)
    return PasswordHash(n, BLOCK, PARALLEL, salt, _scrypt(password.encode(), salt, n, BLOCK, PARALLEL, 32))


def user_problem(user: str) -> str | None:
    """What is wrong with a user's name, which may not end its field or its line."""
    if not user:
        return "no user"
    if ":" in user or not user.isprintable() or user.startswith("#") or user != user.strip():
        return "a user's name is printable, without colons, and neither begins with # nor with a space"
    return None


def read_tokens(text: str) -> tuple[bytes, ...]:
    """The tokens of a file, one a line; blank lines and lines with # are skipped. Raises `ValueError`."""
    tokens = []
    for number, line in _lines(text):
        if not re.fullmatch(r"[!-~]+", line):
            raise ValueError(f"line {number} is no token, which is one word of printable ASCII")
        tokens.append(line.encode("ascii"))
    if not tokens:
        raise ValueError("holds no token")
    return tuple(tokens)


def read_users(text: str) -> Mapping[str, PasswordHash]:
    """The users of a file, `user:hash` a line; blank lines and lines with # are skipped. Raises `ValueError`."""
    users: dict[str, PasswordHash] = {}
    for number, line in _lines(text):
        user, colon, written = line.partition(":")
        if not colon or (problem := user_problem(user)):
            raise ValueError(
                f"line {number} is not of the form user:hash" if not colon else f"line {number}: {problem}"
            )
        if user in users:
            raise ValueError(f"line {number} names a user for the second time")
        try:
            users[user] = _parse(written)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not users:
        raise ValueError("holds no user")
    return users


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def _parse(written: str) -> PasswordHash:
    if _BCRYPT.match(written):
        raise ValueError("bcrypt hashes are not understood, only those of `stallwatch hash-password`")
    fields = re.fullmatch(r"scrypt\$(\d{1,8})\$(\d{1,4})\$(\d{1,4})\$([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+)", written)
    if fields is None:
        raise ValueError("not a hash of the form scrypt$n$r$p$salt$hash")
    n, r, p = (int(fields[one]) for one in (1, 2, 3))
    if n < 2 or n & (n - 1) or r < 1 or p < 1:
        raise ValueError("n is a power of two, and r and p are at least 1")
    if 128 * n * r > MEMORY_MAX or n * r * p > _COST_MAX:
        raise ValueError("costs too much to verify")
    try:
        salt, digest = (base64.b64decode(fields[one], validate=True) for one in (4, 5))
    except binascii.Error:
        raise ValueError("salt or hash is not base64") from None
    if len(salt) < 8 or not 16 <= len(digest) <= 64:
        raise ValueError("a salt has 8 bytes or more, a hash 16 to 64")
    return PasswordHash(n, r, p, salt, digest)


def _scrypt(password: bytes, salt: bytes, n: int, r: int, p: int, length: int) -> bytes:
    maxmem = 128 * r * (n + p + 2) + 1024 * 1024
    return hashlib.scrypt(password, salt=salt, n=n, r=r, p=p, maxmem=maxmem, dklen=length)
