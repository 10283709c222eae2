"""Who may read `/metrics`, the page and the API. The probes are for everyone.

A token is compared in constant time. A password costs a fraction of a second of CPU, by design, on the machine of the
server that is watched: so one is verified at a time, in a thread; each address has few wrong guesses; and the last
right ones are remembered, as a hash under a key that never leaves this process. No credential is ever logged.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from stallwatch.settings import WebSettings
from stallwatch.web.credentials import PasswordHash, read_tokens, read_users
from stallwatch.web.reloading import Clock, Reloading

log = structlog.get_logger()

EXEMPT = frozenset({"/livez", "/readyz"})

_REMEMBERED = 64  # right credentials
_UNDER_WAY = 8  # verifications, the one that runs and those that wait for it
_BURST = 5  # wrong passwords that one address may try in a row
_GUESS_SECONDS = 5.0  # after which it may try one more
_ADDRESSES = 1024
_QUIET_SECONDS = 60.0  # between two lines in the log about refused requests

RunVerify = Callable[[Callable[[], bool]], Awaitable[bool]]


class Verdict(Enum):
    """What becomes of a request."""

    ADMITTED = auto()
    NO_CREDENTIALS = auto()
    WRONG_CREDENTIALS = auto()
    TOO_MANY_GUESSES = auto()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that are right."""

    digests: tuple[bytes, ...]

    def holds(self, token: bytes) -> bool:
        """Whether the token is one of them, in the same time whichever it is."""
        tried = hashlib.sha256(token).digest()
        found = False
        for digest in self.digests:
            found |= hmac.compare_digest(tried, digest)
        return found


@dataclass(frozen=True, slots=True)
class Users:
    """The users of one state of the file, and what was right by it."""

    hashes: Mapping[str, PasswordHash]
    decoy: PasswordHash
    """Verified for users that do not exist, so that they cost as much as those that do."""
    remembered: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    under_way: dict[bytes, asyncio.Task[bool]] = field(default_factory=dict)

    def remember(self, mark: bytes) -> None:
        """Keeps a right one, and forgets the one that was longest unused."""
        self.remembered[mark] = None
        self.remembered.move_to_end(mark)
        while len(self.remembered) > _REMEMBERED:
            self.remembered.popitem(last=False)


class Guesses:
    """How many wrong passwords each address has left."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str) -> bool:
        """Takes one, if there is one."""
        left = self._now(address)
        if left < 1:
            return False
        self._keep(address, left - 1)
        return True

    def give_back(self, address: str) -> None:
        """The password was right after all."""
        self._keep(address, min(_BURST, self._now(address) + 1))

    def _now(self, address: str) -> float:
        left, at = self._left.get(address, (float(_BURST), self._clock()))
        return min(_BURST, left + (self._clock() - at) / _GUESS_SECONDS)

    def _keep(self, address: str, left: float) -> None:
        self._left[address] = (left, self._clock())
        self._left.move_to_end(address)
        while len(self._left) > _ADDRESSES:
            self._left.popitem(last=False)


class Guard:
    """Judges requests by their Authorization header."""

    def __init__(
        self,
        *,
        tokens: Reloading[Tokens] | None = None,
        users: Reloading[Users] | None = None,
        run_blocking: RunVerify = asyncio.to_thread,
        clock: Clock = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._users = users
        self._run_blocking = run_blocking
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._guesses = Guesses(clock)
        self._one_at_a_time = asyncio.Lock()
        self._told = -_QUIET_SECONDS
        self._refused = 0

    @property
    def challenges(self) -> tuple[str, ...]:
        """What a client is told to send."""
        basic = ('Basic realm="stallwatch", charset="UTF-8"',) if self._users else ()
        bearer = ('Bearer realm="stallwatch"',) if self._tokens else ()
        return basic + bearer

    async def judge(self, authorization: str | None, address: str) -> Verdict:
        """What becomes of a request with this header from this address."""
        scheme, _, credentials = (authorization or "").strip().partition(" ")
        scheme, credentials = scheme.lower(), credentials.strip()
        if scheme == "bearer" and self._tokens is not None:
            tokens = await self._tokens.fresh()
            right = tokens.holds(credentials.encode("utf-8", "surrogateescape"))
            return Verdict.ADMITTED if right else Verdict.WRONG_CREDENTIALS
        if scheme == "basic" and self._users is not None:
            decoded = _decoded(credentials)
            if decoded is None:
                return Verdict.WRONG_CREDENTIALS
            return await self._judge_password(await self._users.fresh(), decoded, address)
        return Verdict.WRONG_CREDENTIALS if scheme else Verdict.NO_CREDENTIALS

    async def _judge_password(self, users: Users, decoded: bytes, address: str) -> Verdict:
        mark = hashlib.blake2b(decoded, key=self._secret, digest_size=32).digest()
        if mark in users.remembered:
            users.remember(mark)
            return Verdict.ADMITTED
        task = users.under_way.get(mark)
        is_first = task is None
        if task is None:
            if len(users.under_way) >= _UNDER_WAY or not self._guesses.take(address):
                return Verdict.TOO_MANY_GUESSES
            # A browser sends several requests at once with a password that we do not know yet: they share one look.
            task = users.under_way[mark] = asyncio.create_task(self._verify(users, decoded))
            task.add_done_callback(lambda _: users.under_way.pop(mark, None))
        if not await asyncio.shield(task):
            return Verdict.WRONG_CREDENTIALS
        if is_first:
            self._guesses.give_back(address)
            users.remember(mark)
        return Verdict.ADMITTED

    async def _verify(self, users: Users, decoded: bytes) -> bool:
        name, _, password = decoded.partition(b":")
        known = users.hashes.get(name.decode("utf-8", "replace"))
        async with self._one_at_a_time:
            matches = await self._run_blocking(partial((known or users.decoy).matches, password))
        return matches and known is not None

    def middleware(self) -> Middleware:
        """Asks every request but the probes for its credentials."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path in EXEMPT:
                return await handler(request)
            address = request.remote or ""
            verdict = await self.judge(request.headers.get("Authorization"), address)
            if verdict is Verdict.ADMITTED:
                return await handler(request)
            self._tell(verdict, address)
            if verdict is Verdict.TOO_MANY_GUESSES:
                return web.Response(
                    status=429, text="too many wrong passwords\n", headers={"Retry-After": f"{_GUESS_SECONDS:g}"}
                )
            response = web.Response(status=401, text="credentials are needed\n")
            for challenge in self.challenges:
                response.headers.add("WWW-Authenticate", challenge)
            return response

        return guarded

    def _tell(self, verdict: Verdict, address: str) -> None:
        self._refused += 1
        now = self._clock()
        if now - self._told >= _QUIET_SECONDS:
            reason = verdict.name.lower().replace("_", " ")
            log.warning("requests refused", count=self._refused, reason=reason, address=address)
            self._told = now
            self._refused = 0


def guard_for(settings: WebSettings, *, clock: Clock = time.monotonic) -> Guard | None:
    """What these settings say of credentials, or None. Raises `OSError` or `ValueError` when a file cannot be used."""
    token_file, user_file = settings.bearer_token_file, settings.basic_auth_file
    if token_file is None and user_file is None:
        return None
    tokens = users = None
    if token_file is not None:
        tokens = Reloading([token_file], lambda: load_tokens(token_file.read_text("utf-8")), clock=clock)
    if user_file is not None:
        users = Reloading([user_file], lambda: load_users(user_file.read_text("utf-8")), clock=clock)
    return Guard(tokens=tokens, users=users, clock=clock)


def load_tokens(text: str) -> Tokens:
    """The tokens of a file. Raises `ValueError`."""
    return Tokens(tuple(hashlib.sha256(token).digest() for token in read_tokens(text)))


def load_users(text: str) -> Users:
    """The users of a file. Raises `ValueError`."""
    hashes = read_users(text)
    return Users(hashes, decoy=max(hashes.values(), key=lambda one: one.n * one.r * one.p).decoy())


def _decoded(credentials: str) -> bytes | None:
    try:
        decoded = base64.b64decode(credentials, validate=True)
    except (binascii.Error, ValueError):
        return None
    return decoded if b":" in decoded else None
