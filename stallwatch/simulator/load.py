"""The traffic of a scenario: who asks what, when, and for how long they wait.

Requests of the load enter the engine directly, not through HTTP, but count everywhere as HTTP ones do. Single
arrivals and closed-loop users are values; the player turns them into requests as simulated time passes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from stallwatch.simulator.request import Request, synthetic_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request. Equal `identity` repeats a whole prompt; equal `prefix` shares its first `prefix_tokens`."""

    at: float
    prompt_tokens: int
    output_tokens: int
    identity: int | None = None
    prefix: int | None = None
    prefix_tokens: int = 0
    priority: int = 0
    rank: int | None = None
    abort_after: float | None = None
    retries: int = 0
    external_tokens: int = 0
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Readers who ask again as soon as their answer is complete, from `start` to `end`."""

    count: int
    prompt_tokens: int
    output_tokens: int
    start: float = 0.0
    end: float = inf
    stagger: float = 0.1
    think: float = 0.0
    prefix: int | None = None
    prefix_tokens: int = 0
    rank: int | None = None
    external_tokens: int = 0
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """All traffic of a scenario."""

    arrivals: tuple[Arrival, ...] = ()
    users: tuple[Users, ...] = ()


def every(period: float, first: Arrival, *, times: int) -> tuple[Arrival, ...]:
    """The same request again and again."""
    return tuple(replace(first, at=first.at + i * period) for i in range(times))


def poisson(rate: float, first: Arrival, *, until: float, seed: int = 0) -> tuple[Arrival, ...]:
    """Requests at random times, the same ones for the same seed."""
    rng = Random(seed)  # noqa: S311  # a simulation, not a secret
    arrivals = []
    at = first.at
    while at < until:
        arrivals.append(replace(first, at=at))
        at += rng.expovariate(rate)
    return tuple(arrivals)


@dataclass(frozen=True, slots=True)
class Submit:
    """A request enters now; `rank` None leaves the choice to the balancer."""

    request: Request
    rank: int | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of a request goes away now."""

    request: Request


@dataclass(order=True, slots=True)
class _Event:
    at: float
    order: int
    arrival: Arrival | None = field(compare=False, default=None)
    cancel: Request | None = field(compare=False, default=None)
    user: tuple[Users, int] | None = field(compare=False, default=None)


class LoadPlayer:
    """Plays a load: says when the next thing happens, and what it is."""

    def __init__(self, load: Load) -> None:
        self._events: list[_Event] = []
        self._order = count()
        self._numbers = count(1)
        self._owners: dict[str, tuple[Users, int]] = {}
        self._retrying: dict[str, Arrival] = {}
        for arrival in load.arrivals:
            self._push(arrival.at, arrival=arrival)
        for users in load.users:
            for seat in range(users.count):
                self._push(users.start + seat * users.stagger, user=(users, seat))

    def next_at(self) -> float:
        """When the next request enters or leaves."""
        return self._events[0].at if self._events else inf

    def due(self, now: float) -> Iterator[Submit | Cancel]:
        """What happens up to `now`, in order."""
        while self._events and self._events[0].at <= now:
            event = heappop(self._events)
            if event.arrival is not None:
                yield self._arrive(event.arrival, event.at)
            elif event.user is not None:
                yield self._ask(event.user)
            elif event.cancel is not None:
                yield Cancel(event.cancel)
                self._retry(event.cancel, event.at)

    def finished(self, request: Request, now: float) -> None:
        """Tells that a request of the load has its last token; its user, if it has one, asks again."""
        self._retrying.pop(request.id, None)
        owner = self._owners.pop(request.id, None)
        if owner is not None and now + owner[0].think < owner[0].end:
            self._push(now + owner[0].think, user=owner)

    def lost(self, request: Request, back_at: float) -> None:
        """Tells that the server died under a request; its user asks again once it is back."""
        self._retrying.pop(request.id, None)
        owner = self._owners.pop(request.id, None)
        if owner is not None and back_at < owner[0].end:
            self._push(back_at + owner[1] * owner[0].stagger, user=owner)

    def _push(
        self,
        at: float,
        *,
        arrival: Arrival | None = None,
        cancel: Request | None = None,
        user: tuple[Users, int] | None = None,
    ) -> None:
        heappush(self._events, _Event(at, next(self._order), arrival, cancel, user))

    def _arrive(self, arrival: Arrival, at: float) -> Submit:
        number = next(self._numbers)
        if arrival.retries and arrival.identity is None:
            arrival = replace(arrival, identity=-number)
        request = Request(
            id=f"load-{number}",
            prompt=synthetic_prompt(
                arrival.identity if arrival.identity is not None else number,
                arrival.prompt_tokens,
                prefix=arrival.prefix,
                prefix_tokens=arrival.prefix_tokens,
            ),
            max_tokens=arrival.output_tokens,
            priority=arrival.priority,
            external_tokens=arrival.external_tokens,
            transfer_seconds=arrival.transfer_seconds,
            background=True,
        )
        if arrival.abort_after is not None:
            self._push(at + arrival.abort_after, cancel=request)
            self._retrying[request.id] = arrival
        return Submit(request, arrival.rank)

    def _ask(self, user: tuple[Users, int]) -> Submit:
        users, _ = user
        number = next(self._numbers)
        request = Request(
            id=f"load-{number}",
            prompt=synthetic_prompt(
                number, users.prompt_tokens, prefix=users.prefix, prefix_tokens=users.prefix_tokens
            ),
            max_tokens=users.output_tokens,
            external_tokens=users.external_tokens,
            transfer_seconds=users.transfer_seconds,
            background=True,
        )
        self._owners[request.id] = user
        return Submit(request, users.rank)

    def _retry(self, request: Request, now: float) -> None:
        arrival = self._retrying.pop(request.id, None)
        if arrival is not None and arrival.retries:
            self._push(now, arrival=replace(arrival, at=now, retries=arrival.retries - 1))
