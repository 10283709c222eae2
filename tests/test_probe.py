"""`stallwatch probe`: figures and bars from values, and streams of simulated and broken servers."""

import asyncio
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stallwatch
from stallwatch import cli
from stallwatch.commands.bars import Bin, drawn, histogram
from stallwatch.commands.probe import _debug, tell
from stallwatch.commands.probe_text import Told, debug_text, document, text, without_secrets
from stallwatch.commands.probing import Asked, Probe, progress_line, run_probe
from stallwatch.commands.stream import Recording
from stallwatch.commands.terminal import StatusLine, can_show, redactor, showable
from stallwatch.commands.timing import Timing, timing
from stallwatch.observations import Failure, ObserverSample, StreamOpened, StreamTokens
from stallwatch.settings import Settings
from stallwatch.simulator.faults import Fault, FaultKind
from stallwatch.simulator.scenario import Scenario
from stallwatch.simulator.scenarios import SCENARIOS
from stallwatch.simulator.server import serve
from stallwatch.sources.stream import StreamRequest
from stallwatch.sources.wording import words, words_for
from tests import virtual
from tests.raw_server import SSE_HEAD, Peer, answer, models
from tests.raw_server import Asked as AskedRaw
from tests.raw_server import serve as serve_raw

ROOT = Path(__file__).parent.parent
KEY = "sk-a-very-secret-key"
QUIET = SCENARIOS["quiet"]
FEW = Asked(tokens=64)


# --- figures -------------------------------------------------------------------------------------------------------


def steady(number: int, *, every: float = 0.03, start: float = 0.5, tokens: int = 1) -> list[tuple[float, int]]:
    return [(start + n * every, tokens) for n in range(number)]


def test_the_figures_of_a_stream_with_one_freeze() -> None:
    """A freeze of 6 s among 250 gaps: nothing in p50 and p99, everything in the largest and in the time spent."""
    before = steady(200)
    after = steady(51, start=before[-1][0] + 6.0)
    seen = timing(0.0, before + after, until=after[-1][0], is_open=False)

    assert seen.ttft == 0.5
    assert (seen.tokens, seen.chunks, seen.most_tokens, seen.open_gap) == (251, 251, 1, None)
    assert seen.icl[0.5] == pytest.approx(0.03)
    assert seen.itl[0.99] == pytest.approx(0.03)
    assert seen.icl_max == seen.itl_max == pytest.approx(6.0)
    assert seen.time_weighted[0.5] == pytest.approx(0.03)
    assert seen.time_weighted[0.95] == pytest.approx(6.0)


def test_gaps_and_tokens_differ_when_chunks_carry_several() -> None:
    """ICL is what a reader feels, ITL is shared among the tokens that came together."""
    seen = timing(0.0, steady(80, every=0.4, tokens=4), until=40.0, is_open=False)

    assert seen.tokens_a_chunk == 4
    assert seen.icl[0.95] == pytest.approx(0.4)
    assert seen.itl[0.95] == pytest.approx(0.1)
    assert seen.tokens_a_second == pytest.approx(10.0)
    assert 0.99 not in seen.icl
    assert 0.99 in seen.itl


def test_a_stream_that_is_still_open() -> None:
    """The gap that is open counts as it does in the exported figures, and stands apart."""
    seen = timing(10.0, [(at + 10.0, n) for at, n in steady(100)], until=10.0 + 0.5 + 99 * 0.03 + 8.0, is_open=True)

    assert seen.open_gap == pytest.approx(8.0)
    assert seen.icl_max == pytest.approx(0.03)
    assert seen.time_weighted[0.95] == pytest.approx(8.0)

    silent = timing(10.0, [], until=14.0, is_open=True)

    assert (silent.ttft, silent.tokens, silent.open_gap) == (None, 0, 4.0)


def test_gaps_that_are_our_own_are_left_out() -> None:
    """A gap that our own lateness explains is counted apart and kept out of every quantile."""
    arrivals = [*steady(70), (0.5 + 69 * 0.03 + 1.0, 1)]
    lags = [ObserverSample(0.4, 0.0), ObserverSample(2.6, 0.001), ObserverSample(3.57, 0.95)]
    seen = timing(0.0, arrivals, until=4.0, is_open=False, lags=lags)

    assert (seen.excluded, seen.lateness) == (1, 0.95)
    assert [gap.ours for gap in seen.gaps].count(True) == 1
    assert seen.icl_max == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("gaps", "rows"),
    [
        ([], []),
        ([0.0, -1.0], []),
        ([0.03], [(0.03, 0.035, 1)]),
        ([0.031, 0.032, 0.036], [(0.03, 0.035, 2), (0.035, 0.04, 1)]),
        ([0.01, 0.0999], [(0.01, 0.011, 1), *[()] * 18, (0.09, 0.1, 1)]),
    ],
)
def test_the_bins_of_a_histogram(gaps: list[float], rows: Sequence[tuple[float, ...]]) -> None:
    """Bins reach from the shortest to the longest gap on a logarithmic scale, as fine as 20 rows allow."""
    bins = histogram(gaps)

    assert len(bins) == len(rows)
    for one, row in zip(bins, rows, strict=True):
        if row:
            assert (one.low, one.high, one.gaps) == pytest.approx(row)


@pytest.mark.parametrize("longest", [0.04, 0.5, 5.0, 60.0, 3600.0])
def test_a_histogram_counts_every_gap_once(longest: float) -> None:
    """However wide the range, rows are few, counts and times add up, and each gap lies in its bin."""
    rng = random.Random(3)
    gaps = [0.0003, longest, *(rng.uniform(0.0003, longest) for _ in range(500))]
    bins = histogram(gaps)

    assert len(bins) <= 24
    assert sum(one.gaps for one in bins) == len(gaps)
    assert sum(one.seconds for one in bins) == pytest.approx(sum(gaps))
    for one in bins:
        inside = [gap for gap in gaps if one.low <= gap < one.high]
        assert len(inside) == one.gaps


DRAWN_BINS = (
    Bin(0.03, 0.035, 16, 0.5),
    Bin(0.035, 0.04, 3, 0.1),
    Bin(0.04, 0.045, 0, 0.0),
    Bin(0.045, 0.05, 0, 0.0),
    Bin(0.05, 0.055, 0, 0.0),
    Bin(0.9, 1.0, 1, 0.95),
)
DRAWN = """\
             gaps                          of the time
   30-35 ms  ██████████████████████    16         32 %
   35-40 ms  ████▏                      3        6.5 %
        ...
900-1000 ms  █▍                         1         61 %
"""
DRAWN_ASCII = """\
             gaps                          of the time
   30-35 ms  ######################    16         32 %
   35-40 ms  ####                       3        6.5 %
        ...
900-1000 ms  #                          1         61 %
"""


@pytest.mark.parametrize(("unicode", "expected"), [(True, DRAWN), (False, DRAWN_ASCII)])
def test_a_histogram_is_drawn(unicode: bool, expected: str) -> None:  # noqa: FBT001
    """A row a bin with its share of the time; rows without gaps are folded; ASCII where bars cannot be shown."""
    assert "\n".join(drawn(DRAWN_BINS, width=54, unicode=unicode)) + "\n" == expected


@pytest.mark.parametrize(
    ("encoding", "shows"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("cp437", False)]
)
def test_what_a_terminal_can_show(encoding: str, shows: bool) -> None:  # noqa: FBT001
    """Bars are drawn only where the encoding has all of them, and no text ever fails to print."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)

    assert can_show("▏▎▍▌▋▊▉█", stream) is shows
    stream.write(showable("Größe ▏ 名", stream))


def test_the_progress_line_is_for_terminals_only() -> None:
    """It is written over on a terminal, and absent from a file or a pipe."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Terminal(), "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[K"), (io.StringIO(), "")):
        line = StatusLine(stream)
        line.show("one")
        line.show("two")
        line.clear()
        line.clear()

        assert stream.getvalue() == expected


def request(tokens: int = 8) -> StreamRequest:
    return StreamRequest(stream=1, engine="0", request_id="r-1", model="m", prompt="p", tokens=tokens)


def test_progress() -> None:
    """It says what is waited for, how much came, and how long the gap is that is open."""
    probe = Probe()

    assert progress_line(probe, 8, 0.0) == "asking for the model"
    probe.recording = Recording(request())
    probe.recording.observe(StreamOpened(1.0, 1, "0", "r-1"))

    assert progress_line(probe, 8, 4.0) == "waiting for the first token: 3.00 s"
    for at in (4.0, 4.5, 4.6):
        probe.recording.observe(StreamTokens(at, 1, 2))

    assert progress_line(probe, 8, 6.0) == "6 of 8 tokens in 5.00 s; longest gap 500 ms, open gap 1.40 s"


def test_events_that_are_kept_are_bounded() -> None:
    """A server that floods us with events fills no memory; those left out are counted."""
    recording = Recording(request(tokens=2))
    for _ in range(100):
        recording.tap(0.0, "x" * 5000)

    assert (len(recording.events), recording.events_left_out) == (68, 32)
    assert {len(data) for _, data in recording.events} == {2000}


def test_prompts_of_a_length() -> None:
    """Words are scaled by what a sample of 200 of them counted, and no two prompts are alike."""
    rng = random.Random(1)

    assert words_for(1000, 200) == 1000
    assert words_for(1000, 1200) == 167
    assert words_for(1000, None) == 1000
    assert words_for(1, 1200) == 1
    assert len(words(500, rng).split()) == 500
    assert words(50, rng) != words(50, rng)


def test_headers_without_secrets() -> None:
    """What authorises is named and hidden, whatever else repeats the key too."""
    headers = {"Authorization": f"Bearer {KEY}", "X-Copy": KEY, "Accept": "text/event-stream"}

    assert without_secrets(headers, lambda said: said.replace(KEY, "...")) == {
        "Authorization": "Bearer (hidden)",
        "X-Copy": "...",
        "Accept": "text/event-stream",
    }


TEXT = """\
stallwatch VERSION probes http://127.0.0.1:8000
model m, completions, request r-1
timeout (no new token for 2 s): 71 of 256 tokens in 5.60 s; prompt of 1,234 tokens, 0 of them cached

first token               500 ms
still open at the end     3.00 s
rate                        33.3 tokens/s
tokens a chunk              1.00, at most 1

                             p50       p95       p99       max
gap (ICL)                30.0 ms   30.0 ms         -   30.0 ms
per token (ITL)          30.0 ms   30.0 ms         -   30.0 ms
gap, by time spent        3.00 s    3.00 s    3.00 s         -
                      (p95 needs 60 tokens, p99 200)

own lateness             1.00 ms at worst

gaps by length
"""


def told(**more: Any) -> Told:
    lags = [ObserverSample(0.1, 0.001)]
    known: dict[str, Any] = {
        "url": "http://127.0.0.1:8000",
        "api": "completions",
        "outcome": "timeout",
        "model": "m",
        "request_id": "r-1",
        "asked": 256,
        "prompt_tokens": 1234,
        "cached_tokens": 0,
        "reason": "timeout",
        "detail": "no new token for 2 s",
        "timing": timing(0.0, steady(71), until=5.6, is_open=True, lags=lags),
    }
    return Told(**{**known, **more})


def test_a_probe_is_read_by_a_person() -> None:
    """What ended it, the waits, the quantiles that so many tokens give, then the bars; within 100 columns."""
    shown = text(told(), gaps=False, unicode=True).replace(stallwatch.__version__, "VERSION")

    assert shown.startswith(TEXT)
    assert max(len(line) for line in shown.splitlines()) <= 100
    listed = text(told(), gaps=True, unicode=True)
    assert len(re.findall(r"^ +\d+\.\d{4} +30\.0 ms$", listed, re.MULTILINE)) == 70


def test_a_request_that_was_refused_has_no_figures() -> None:
    """The reason stands alone."""
    refused = told(outcome="rejected", reason="rejected", detail="HTTP 404", timing=Timing(seconds=0.01))

    assert text(refused, gaps=True, unicode=True).splitlines()[2:] == [
        "rejected (HTTP 404): 0 of 256 tokens in 10.0 ms; prompt of 1,234 tokens, 0 of them cached"
    ]


def test_the_json_form_has_a_version() -> None:
    """Seconds everywhere, null for what is not known, gaps only when they were asked for."""
    brief = json.loads(document(told(), gaps=False, debug=None))
    whole = json.loads(document(told(), gaps=True, debug=None))

    assert (brief["schema"], brief["outcome"]) == ("stallwatch.probe/1", "timeout")
    assert brief["timing"]["icl_seconds"] == {"p50": 0.03, "p95": 0.03, "p99": None, "max": 0.03} | {
        "p50": pytest.approx(0.03),
        "p95": pytest.approx(0.03),
        "max": pytest.approx(0.03),
    }
    assert "gaps" not in brief["timing"]
    assert len(whole["timing"]["gaps"]) == 70
    assert "debug" not in brief


# --- against servers -----------------------------------------------------------------------------------------------


def probed(
    scenario: Scenario | Callable[[AskedRaw, Peer], Any],
    *,
    at: float = 0.0,
    cancel_after: float | None = None,
    asked: Asked = FEW,
    lines: list[str] | None = None,
    **rooms: Any,
) -> tuple[Probe, Told, Settings]:
    """Probes a server `at` seconds after it began, and is interrupted after a time."""

    async def main() -> tuple[Probe, Told, Settings]:
        loop = asyncio.get_running_loop()
        serving = serve(scenario, clock=loop.time) if isinstance(scenario, Scenario) else serve_raw(scenario)
        async with serving as server:
            await asyncio.sleep(at)
            engine = {"url": server.url, **rooms.pop("engine", {})}
            settings = Settings.model_validate({"engine": engine, **rooms})
            work = asyncio.create_task(
                run_probe(
                    settings,
                    asked,
                    clock=loop.time,
                    rng=random.Random(1),
                    progress=(lines if lines is not None else []).append,
                )
            )
            if cancel_after is not None:
                loop.call_later(cancel_after, work.cancel)
            probe = await work
        redact = redactor(settings.canary_access, settings.engine_access)
        return probe, tell(probe, settings, asked, redact), settings

    return virtual.run(main())


def test_a_probe_feels_what_readers_feel() -> None:
    """On a quiet server every token is timed; a long prompt shows in gaps of a second."""
    probe, seen, _ = probed(QUIET, at=5.0, asked=Asked(tokens=256))

    assert probe.finished
    assert seen.timing is not None
    assert (seen.timing.tokens, seen.timing.excluded) == (256, 0)
    assert 0.02 < seen.timing.icl[0.5] < 0.05
    assert seen.timing.icl_max is not None
    assert seen.timing.icl_max < 0.2

    _, frozen, _ = probed(SCENARIOS["long-prefill"], at=20.0, asked=Asked(tokens=200))

    assert frozen.timing is not None
    assert frozen.timing.icl_max is not None
    assert frozen.timing.icl_max > 0.9
    assert frozen.timing.time_weighted[0.5] > 0.5


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_prompt_of_about_the_length_asked_for(api: str) -> None:
    """One small request tells how many tokens a word is; the prompt is not cached."""
    probe, seen, _ = probed(QUIET, asked=Asked(tokens=4, prompt_tokens=6000), canary={"api": api})

    assert probe.finished
    assert seen.prompt_tokens == pytest.approx(6000, rel=0.1)
    assert seen.timing is not None
    assert seen.timing.ttft is not None
    assert seen.timing.ttft > 0.5


def test_chunks_of_several_tokens() -> None:
    """Under speculative decoding tokens are counted by the server's own usage."""
    _, seen, _ = probed(SCENARIOS["spec-decode"], at=3.0, asked=Asked(tokens=200))

    assert seen.timing is not None
    assert seen.timing.tokens == 200
    assert seen.timing.tokens_a_chunk is not None
    assert seen.timing.tokens_a_chunk > 1.5
    assert seen.timing.itl[0.5] < seen.timing.icl[0.5]


def test_an_interrupted_probe_tells_what_it_has() -> None:
    """Being cancelled is no failure of the server: figures until then, and the connection is closed."""
    lines: list[str] = []
    probe, seen, _ = probed(QUIET, at=5.0, cancel_after=2.0, asked=Asked(tokens=1000), lines=lines)

    assert (probe.interrupted, seen.outcome, seen.reason) == (True, "interrupted", None)
    assert seen.timing is not None
    assert 30 < seen.timing.tokens < 100
    assert seen.timing.seconds == pytest.approx(2.0, abs=0.1)
    assert lines[0] == "asking for the model"
    assert re.search(r"^\d+ of 1000 tokens in [12]\.\d+ s; longest gap \d+\.\d ms, open gap", lines[-1])


async def refuses(ask: AskedRaw, peer: Peer) -> None:
    if ask.path == "/v1/models":
        await peer.send(models({"id": "m", "object": "model"}))
    else:
        said = json.dumps({"error": {"message": f"no, {ask.headers.get('authorization')}"}}).encode()
        await peer.send(answer("403 Forbidden", said))


async def stops(ask: AskedRaw, peer: Peer) -> None:
    if ask.path == "/v1/models":
        await peer.send(models({"id": "m", "object": "model"}))
        return
    await peer.send(SSE_HEAD)
    for number in range(3):
        await peer.data({"choices": [{"text": "a"}], "usage": {"completion_tokens": number + 1}})
        await asyncio.sleep(0.1)
    await asyncio.sleep(1e6)


async def breaks(ask: AskedRaw, peer: Peer) -> None:
    if ask.path == "/v1/models":
        await peer.send(models({"id": "\x1b[2Jm", "object": "model"}, {"id": "m", "object": "model"}))
        return
    await peer.send(SSE_HEAD)
    await peer.data({"choices": [{"text": "a"}]}, {"choices": [{"text": "\u202eb\x1b[2J"}]})


async def has_no_models(_: AskedRaw, peer: Peer) -> None:
    await peer.send(answer("404 Not Found"))


@pytest.mark.parametrize(
    ("script", "outcome", "reason", "tokens", "open_gap"),
    [
        (refuses, "auth", Failure.AUTH, 0, None),
        (stops, "timeout", Failure.TIMEOUT, 3, 30.0),
        (breaks, "cut", Failure.CUT, 2, 0.0),
        (has_no_models, "failed", Failure.REJECTED, None, None),
    ],
)
def test_a_stream_that_fails_says_why(
    script: Callable[[AskedRaw, Peer], Any], outcome: str, reason: Failure, tokens: int | None, open_gap: float | None
) -> None:
    """The reason, what came until then, and no secret, even from a server that repeats it."""
    probe, seen, settings = probed(script, engine={"api_key": KEY}, canary={"timeout_seconds": 30})

    assert (seen.outcome, seen.reason, probe.finished) == (outcome, reason, False)
    assert (seen.timing.tokens if seen.timing is not None else None) == tokens
    if seen.timing is not None:
        assert seen.timing.open_gap == (None if open_gap is None else pytest.approx(open_gap, abs=0.01))
    redact = redactor(settings.canary_access)
    debug = _debug(probe, settings, redact)
    shown = text(seen, gaps=True, unicode=True) + document(seen, gaps=True, debug=debug)
    shown += debug_text(debug) if debug is not None else ""
    assert KEY not in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_an_error_within_a_stream() -> None:
    """An engine that dies while the answer is written is the server's error."""
    broken = replace(QUIET, faults=(Fault(FaultKind.STREAM_ERROR, 2.0, 3.0),))
    _, seen, _ = probed(broken, at=1.0)

    assert (seen.outcome, seen.reason) == ("server_error", "server_error")
    assert "Internal server error" in seen.detail


def test_debug_shows_everything_but_the_key() -> None:
    """The request as it was sent, each event with its time, and the metrics that the stream would have given."""
    closed = replace(QUIET, server=replace(QUIET.server, api_key=KEY))
    probe, seen, settings = probed(closed, at=3.0, engine={"api_key": KEY}, asked=Asked(tokens=5))
    debug = _debug(probe, settings, redactor(settings.canary_access))

    assert probe.finished
    assert debug is not None
    assert debug.headers["Authorization"] == "Bearer (hidden)"
    assert debug.headers["X-Request-Id"] == seen.request_id
    assert debug.headers["User-Agent"] == "stallwatch"
    assert debug.body["max_tokens"] == 5
    assert debug.address.endswith("/v1/completions")
    assert debug.events[-1][1] == "[DONE]"
    assert [at for at, _ in debug.events] == sorted(at for at, _ in debug.events)
    assert seen.timing is not None
    assert debug.events[0][0] == pytest.approx(seen.timing.ttft)
    metrics = debug.metrics.splitlines()
    assert 'stallwatch_canary_inter_chunk_latency_seconds_count{engine="0"} 4.0' in metrics
    assert 'stallwatch_canary_time_to_first_token_seconds_count{engine="0"} 1.0' in metrics
    assert 'stallwatch_canary_requests_total{outcome="completed"} 1.0' in metrics
    assert 'stallwatch_source_up{source="canary"} 1.0' in metrics
    shown = debug_text(debug)
    assert KEY not in shown
    assert "  Authorization: Bearer (hidden)\n" in shown


# --- the commands as processes -------------------------------------------------------------------------------------


@contextmanager
def simulator() -> Iterator[str]:
    """A simulated server in a process of its own."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "stallwatch.simulator", "--scenario", "quiet", "--port", str(port)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def process(*arguments: str, **environ: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "stallwatch", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_both_commands_as_a_person_runs_them() -> None:
    """`check --wait` beside a server that starts, a probe of it, and a probe that is interrupted, in real time."""
    with simulator() as url:
        check = process("check", "--wait", "30", "--json", "--engine.url", url, STALLWATCH_GPU__ENABLED="off")
        out, err = check.communicate(timeout=60)
        answered = json.loads(out)

        assert (answered["target"], err) == (url, "")
        assert check.returncode == answered["exit_status"]
        assert check.returncode in {0, 3}  # 3 when this machine is too busy to be believed
        levels = {one["subject"]: one["level"] for one in answered["findings"]}
        assert (levels["target"], levels["request"], levels["figures"]) == ("ok", "ok", "ok")

        probe = process("probe", "--url", url, "--tokens", "12", "--json", "--gaps")
        out, err = probe.communicate(timeout=60)
        answered = json.loads(out)

        assert (probe.returncode, err, answered["timing"]["tokens"]) == (0, "", 12)
        assert len(answered["timing"]["gaps"]) == answered["timing"]["chunks"] - 1

        probe = process("probe", "--url", url, "--tokens", "20000", PYTHONIOENCODING="ascii")
        for _ in range(200):
            time.sleep(0.1)
            if _connected(probe.pid):
                break
        time.sleep(1.0)
        with suppress(ProcessLookupError):
            probe.send_signal(signal.SIGINT)
        out, err = probe.communicate(timeout=60)

        assert (probe.returncode, err) == (130, "")
        assert re.search(r"^interrupted: \d+ of 20,000 tokens in", out, re.MULTILINE)


def _connected(pid: int) -> bool:
    """Whether a process holds a TCP connection: then its stream is open, or about to be."""
    sockets = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(str(link.readlink()))
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01" and f"socket:[{fields[9]}]" in sockets:
                return True
    return False


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("check", "--wait", "-1"), "stallwatch check: argument --wait: -1 is not between 0 and 86400 seconds"),
        (("check", "--wait", "nan"), "stallwatch check: argument --wait: nan is not between 0 and 86400 seconds"),
        (("check", "--slo.target", "99"), "--slo.target = 99: too large"),
        (("check", "--jsn"), "--jsn: not a setting"),
        (("probe", "--url", "ftp://x"), "--url = ftp://x: not an http:// or https:// address; write http://x"),
        (("probe", "--api", "chats"), "--api = chats: not one of completions, chat"),
        (("probe", "--tokens", "0"), "stallwatch probe: argument --tokens: 0 is not between 1 and 65,536"),
        (("probe", "--tokens", "many"), "stallwatch probe: argument --tokens: invalid int value"),
        (("probe", "--prompt-tokens", "-5"), "stallwatch probe: argument --prompt-tokens: -5 is not between"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_2(arguments: tuple[str, ...], line: str) -> None:
    """Options and settings are refused alike, in the spelling in which they were given."""
    out, err = io.StringIO(), io.StringIO()
    status = cli.main(arguments, environ={}, stdout=out, stderr=err)

    assert (status, out.getvalue()) == (2, "")
    assert err.getvalue().startswith(f"stallwatch: {line}")
    assert err.getvalue().count("\n") == 1
