"""What each kind of failure means for a person who runs `stallwatch check`, and what to do about it. Data."""

from collections.abc import Mapping
from typing import Final

from stallwatch.commands.survey import Trouble
from stallwatch.observations import Failure

Advice = tuple[str, str]  # what it means; what to do

# What a connector says of these repeats the address and nothing else.
SAID_ALREADY: Final = frozenset({Failure.REFUSED, Failure.DNS})

METRICS: Final[Mapping[Failure, Advice]] = {
    Failure.REFUSED: (
        "nothing answers there: vLLM is still loading its model, or is not there",
        "wait with --wait SECONDS; if it serves already, compare engine.url with its --host and --port",
    ),
    Failure.DNS: (
        "the host's name is not known",
        "correct engine.url; a sidecar finds vLLM at 127.0.0.1, another pod at its Service's name",
    ),
    Failure.TIMEOUT: (
        "it accepts connections and does not answer",
        "look at vLLM's log: it is stopped or overloaded; raise engine.timeout_seconds if it is only slow",
    ),
    Failure.TLS: (
        "no TLS connection comes about",
        "set engine.ca_file, and engine.server_name for a certificate of another name, or write http:// for plain HTTP",
    ),
    Failure.REDIRECT: (
        "it sends us elsewhere, and redirects are never followed",
        "set engine.url to the server's own address",
    ),
    Failure.AUTH: ("it wants a key, or another one", "set engine.api_key_file to a file that holds the key"),
    Failure.BUSY: (
        "it turns requests away: a gateway whose server loads, or is overloaded",
        "wait with --wait SECONDS; better name vLLM itself in engine.url",
    ),
    Failure.REJECTED: (
        "it has no metrics page there",
        "set engine.url to the root of vLLM itself: a gateway or router need not pass on /metrics",
    ),
    Failure.SERVER_ERROR: ("the server fails at its own metrics page", "look at vLLM's log"),
    Failure.TOO_LARGE: (
        "the page is longer than any of vLLM's",
        "set engine.url to one vLLM server, not to a collector of many",
    ),
    Failure.MALFORMED: (
        "what answers there is not vLLM's metrics page",
        "set engine.url to the root of vLLM itself, and run it without --disable-log-stats",
    ),
    Failure.CUT: ("the answer broke off", "try again; if it stays so, look for a proxy in between"),
    Failure.UNAVAILABLE: ("it cannot be asked", "look at vLLM's log"),
}

CANARY: Final[Mapping[Failure, Advice]] = {
    Failure.REFUSED: ("nothing answers at the canary's address", "correct canary.url (by default engine.url)"),
    Failure.DNS: ("the host's name is not known", "correct canary.url"),
    Failure.TIMEOUT: (
        "no answer in time: the server is overloaded or frozen, or a prefill holds everything up",
        "look at the requests that wait; canary.timeout_seconds says how long a canary of `run` waits",
    ),
    Failure.TLS: ("no TLS connection comes about", "set canary.ca_file and canary.server_name"),
    Failure.REDIRECT: ("redirects are never followed", "set canary.url to the final address"),
    Failure.AUTH: (
        "it wants a key, or another one",
        "set canary.api_key_file (engine.api_key_file holds for the canary only at the same host and port)",
    ),
    Failure.BUSY: ("admission control turned it away", "try again when less is waiting"),
    Failure.REJECTED: (
        "the request does not suit this server",
        "set canary.model to a model it serves, or canary.api to chat",
    ),
    Failure.SERVER_ERROR: ("the server failed at it", "look at vLLM's log"),
    Failure.TOO_LARGE: ("the answer has no end", "is canary.url a vLLM server?"),
    Failure.MALFORMED: (
        "the answer is not a stream of tokens",
        "set canary.url to the API's root, without /v1; try canary.api chat",
    ),
    Failure.CUT: ("the stream broke off", "look for a proxy in between that cuts long answers"),
    Failure.UNAVAILABLE: ("it cannot be asked", "look at vLLM's log"),
}


def told(trouble: Trouble) -> str:
    """The server's or the network's own words in brackets, where they say more than the reason does."""
    silent = not trouble.detail or (trouble.reason in SAID_ALREADY and trouble.detail.startswith("Cannot connect"))
    return "" if silent else f" ({trouble.detail})"
