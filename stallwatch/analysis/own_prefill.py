"""Our own canary's prompts among the prefill that the engine computes.

A canary's prompt is a few dozen tokens and is computed between its sending and its first token. How long it is, vLLM
says only when the stream ends, and all of them are alike: so as many tokens as the last one had are taken out of the
prefill seen meanwhile.
"""

from dataclasses import dataclass, field
from typing import Final

UNKNOWN_PROMPT: Final = 256.0
"""Tokens taken for a canary's prompt before any stream has told its length: the most that it may have."""
_GRACE: Final = 2
"""Scrapes after a first token by which the server has booked its prompt."""


@dataclass(slots=True)
class _Due:
    tokens: float
    grace: int | None = None  # scrapes left; None while no token has come


@dataclass(slots=True)
class OwnPrefill:
    """Follows our streams on one engine."""

    typical: float = UNKNOWN_PROMPT
    _due: dict[int, _Due] = field(default_factory=dict)

    def opened(self, stream: int) -> None:
        """A request of ours was sent."""
        self._due[stream] = _Due(self.typical)

    def answered(self, stream: int) -> None:
        """It got a token: its prompt is computed."""
        due = self._due.get(stream)
        if due is not None and due.grace is None:
            due.grace = _GRACE

    def closed(self, stream: int, computed: int | None) -> None:
        """It ended; `computed` prompt tokens were not cached, if that was told."""
        if computed is not None:
            self.typical = float(computed)
        self.answered(stream)

    def restart(self) -> None:
        """The server is another process: nothing of ours is on its way any more."""
        self._due.clear()

    @property
    def expected(self) -> float:
        """Tokens of ours that may still be computed."""
        return sum(due.tokens for due in self._due.values())

    def take(self, tokens: float) -> float:
        """How many of the `tokens` that a scrape showed as computed are ours; asked once a scrape."""
        ours = 0.0
        for stream, due in list(self._due.items()):
            part = min(due.tokens, tokens - ours)
            due.tokens -= part
            ours += part
            if due.grace is not None:
                due.grace -= 1
            if due.tokens <= 0 or (due.grace is not None and due.grace < 0):
                del self._due[stream]
        return ours
