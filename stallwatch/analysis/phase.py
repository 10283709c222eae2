"""Which phase of its life the watched server is in, from what its metrics endpoint answers.

vLLM listens only once the model is loaded, so a refused connection before the first answer is a server that starts,
and after it one that is gone. A server that no longer answers in time is still serving: its readers are waiting.
"""

from dataclasses import dataclass
from enum import StrEnum

from stallwatch.observations import EngineSample, Failure, PollFailure

_GONE_AFTER = 1.0  # seconds of nothing but refusals: one refusal may be a full backlog


class Phase(StrEnum):
    """Phases of the watched server; the `phase` label of `target_phase`."""

    STARTING = "starting"
    SERVING = "serving"
    ASLEEP = "asleep"
    GONE = "gone"


@dataclass(slots=True)
class PhaseWatch:
    """Follows the phase from poll to poll."""

    phase: Phase = Phase.STARTING
    since: float | None = None  # when the phase began, as far as seen
    restarts: int = 0  # new process start times seen
    listening: bool = False  # the last poll reached a listener, whatever it answered
    _process_start: float | None = None
    _refused_since: float | None = None

    def answered(self, sample: EngineSample) -> bool:
        """Takes a successful scrape; returns whether the server was seen to be another process than before."""
        self._refused_since = None
        self.listening = True
        restarted = False
        if sample.process_start_unix is not None:
            restarted = self._process_start is not None and sample.process_start_unix != self._process_start
            self._process_start = sample.process_start_unix
        if restarted:
            self.restarts += 1
            self._enter(Phase.STARTING, sample.at)
        elif sample.asleep:
            self._enter(Phase.ASLEEP, sample.at)
        elif sample.asleep is not None or self.phase is not Phase.ASLEEP:
            self._enter(Phase.SERVING, sample.at)
        return restarted

    def failed(self, failure: PollFailure) -> None:
        """Takes a failed scrape."""
        if self.since is None:
            self.since = failure.at
        self.listening = failure.reason not in {Failure.REFUSED, Failure.DNS}
        if self.listening:
            self._refused_since = None
            return
        if self._refused_since is None:
            self._refused_since = failure.at
        if self.phase is not Phase.STARTING and failure.at - self._refused_since >= _GONE_AFTER:
            self._enter(Phase.GONE, failure.at)

    def _enter(self, phase: Phase, at: float) -> None:
        if phase is not self.phase or self.since is None:
            self.phase = phase
            self.since = at
