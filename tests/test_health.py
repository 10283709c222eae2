import structlog

from stallwatch.health import Health
from stallwatch.observations import Failure, PollFailure, Source
from stallwatch.scheduling import Poll


def poll(health: Health, at: float, *, ok: bool) -> None:
    failure = None if ok else PollFailure(at, Source.ENGINE, Failure.REFUSED, "nobody listens")
    health.polled(Poll(Source.ENGINE, at - 0.5, at, failure))


def test_only_changes_are_logged() -> None:
    """A source that goes down and comes back makes one line each, whatever the number of polls."""
    health = Health()
    with structlog.testing.capture_logs() as lines:
        for at in range(10):
            poll(health, float(at), ok=at < 2 or at > 6)

    assert [(line["event"], line.get("down_seconds")) for line in lines] == [
        ("source up", None),
        ("source down", None),
        ("source up", 5.0),
    ]


def test_state_remembers_the_last_success_and_counts_failures() -> None:
    """While a source is down its last success stays known."""
    health = Health()
    poll(health, 1.0, ok=True)
    poll(health, 2.0, ok=False)
    poll(health, 3.0, ok=False)

    state = health.sources[Source.ENGINE]
    assert (state.up, state.last_success, state.since, state.duration) == (False, 1.0, 2.0, 0.5)
    assert health.failures[Source.ENGINE, Failure.REFUSED] == 2
