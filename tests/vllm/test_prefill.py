"""What the engine did in its steps, on the real vLLM: estimates against the plugin's truth for every step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import correlation, mean, median
from typing import Any

import pytest

from stallwatch.analysis.prefill import Evidence, PrefillLadder
from stallwatch.analysis.work import WorkView
from stallwatch.observations import EngineCounters, EngineSample, Lane, ServerFacts
from tests.vllm.environment import Environment
from tests.vllm.load import Request, Stream, decode_stream, long_prompt
from tests.vllm.plugin import FLAGS, mounted
from tests.vllm.recording import Recording, judged, record, without
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

NO_CANARY = {"enabled": False}
BALANCE = without("plugin", "write_bytes")
MFU = without("plugin")


@pytest.fixture(scope="module")
def server(vllm_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server that tells the truth about its steps."""
    variables = mounted(tmp_path_factory.mktemp("plugin"))
    folder = tmp_path_factory.mktemp("vllm")
    with VllmServer(vllm_environment, folder, model="small", flags=FLAGS, variables=variables) as running:
        yield running


@pytest.fixture(scope="module")
def idle(server: VllmServer) -> Recording:
    """A few seconds of the server before anybody asked it anything; must be asked for first."""
    return record(server.url, [], pause=3.0, canary=NO_CANARY)


@pytest.fixture(scope="module")
def uncached(idle: Recording, server: VllmServer) -> Recording:
    """A decoding reader, then an uncached prompt of 12,000 tokens beside it."""
    assert idle.observations
    return record(server.url, [("load", _beside("first"))], canary=NO_CANARY)


@pytest.fixture(scope="module")
def cached(uncached: Recording, server: VllmServer) -> Recording:
    """The same once more: the prompt is in the prefix cache."""
    assert uncached.observations
    return record(server.url, [("load", _beside("first", reader="again"))], canary=NO_CANARY)


def _beside(salt: str, *, reader: str = "reader") -> list[Request]:
    """One reader; the long prompt is sent when it has 1,500 tokens: the decode baseline is known, by slow polls too."""
    return [
        decode_stream(reader, tokens=2_400, salt=f"{salt}-{reader}"),
        long_prompt("long", salt=salt, seed=7, after=reader, after_tokens=1_500),
    ]


def _last(recording: Recording, **more: object) -> WorkView:
    (found,) = judged(recording, [recording.marks["end"]], **more)  # type: ignore[arg-type]
    work = found.engines[0].work
    assert work is not None
    return work


def _samples(recording: Recording) -> list[EngineSample]:
    return [seen for seen in recording.observations if isinstance(seen, EngineSample)]


def test_a_server_that_nobody_used_has_no_figures(idle: Recording) -> None:
    """Before the first request everything about steps is absent, not 0."""
    (found,) = judged(idle, [idle.marks["end"]])

    assert found.engines
    assert found.engines[0].work is None


def test_interference_is_the_truth_whatever_the_evidence_and_the_rate(uncached: Recording) -> None:
    """Beside an uncached prompt the ratio is within 10 % of what every step says, at 4 Hz and at 1 Hz."""
    for name, change in (("plugin", without()), ("mfu", MFU), ("balance", BALANCE)):
        for every in (0.0, 1.0):
            work = _last(uncached, change=change, every=every)
            assert work.interference_mean is not None, (name, every)
            truth = _true_interference(uncached, _judged_since(uncached, change, every))
            error = work.interference_mean / truth - 1
            rate = "1 Hz" if every else "4 Hz"
            print(f"{name:<8} {rate}  interference {work.interference_mean:6.2f}  truth {truth:6.2f}  {error:+.1%}")
            # The write counter is calibrated from scrape to scrape, for which one short run may hold too few.
            assert work.evidence == name or (name == "mfu" and work.evidence == Evidence.BALANCE)
            assert abs(error) < 0.1, (name, every)


def _judged_since(recording: Recording, change: Callable[[EngineCounters], EngineCounters], every: float) -> float:
    """When the first steps were judged: those that were seen before the baseline was known are not."""
    scrapes = [seen.at for seen in _samples(recording) if seen.lane is not Lane.DETECTION]
    findings = judged(recording, [at + 0.01 for at in scrapes], change=change, every=every)
    for at, found in zip(scrapes, findings, strict=True):
        work = found.engines[0].work if found.engines else None
        if work is not None and work.interference_mean is not None:
            return at - every
    raise AssertionError("no step was judged")


def _true_interference(recording: Recording, since: float) -> float:
    """From the plugin's sums over the steps with decoders since then: time beyond the baseline, over the baseline.

    The baseline is what was seen until then: on a machine with other work it drifts. A reader also waits for what lies
    between two steps, which a step's own duration leaves out; vLLM's sums of inter-token latency hold it.
    """
    counters = [(sample.at, sample.engines["0"]) for sample in _samples(recording)]
    counters = [(at, seen) for at, seen in counters if seen.plugin and seen.itl_sum is not None]
    lasted: list[float] = []
    waited: list[float] = []
    base = excess = 0.0
    steps = dict.fromkeys(("decode", "mixed"), 0.0)
    for (_, before), (at, after) in pairwise(counters):
        n, t = (
            {phase: _moment(after.plugin, phase, term) - _moment(before.plugin, phase, term) for phase in steps}
            for term in ("n", "t")
        )
        samples = (after.itl_count or 0.0) - (before.itl_count or 0.0)
        if n["decode"] > 0 and n["mixed"] == 0 and samples > 0:
            lasted.append(t["decode"] / n["decode"])
            waited.append(((after.itl_sum or 0.0) - (before.itl_sum or 0.0)) / samples)
        if waited and at >= since:
            base += median(waited) * (n["decode"] + n["mixed"])
            excess += t["mixed"] - median(lasted) * n["mixed"]
            steps = {phase: steps[phase] + n[phase] for phase in steps}
    levels = " and ".join(f"{median(each) * 1000:.1f}" for each in (lasted, waited))
    print(f"truth: {steps['mixed']:.0f} mixed steps, {steps['decode']:.0f} that last and are waited for {levels} ms")
    return excess / base


def _moment(samples: Mapping[str, float], phase: str, term: str) -> float:
    for key, value in samples.items():
        if "step_moments_total" in key and f'phase="{phase}"' in key and f'term="{term}"' in key:
            return float(value)
    return 0.0


@pytest.mark.parametrize("change", [pytest.param(without(), id="plugin"), pytest.param(BALANCE, id="balance")])
def test_a_cached_prompt_interferes_hardly(
    cached: Recording, uncached: Recording, change: Callable[[EngineCounters], EngineCounters]
) -> None:
    """The same prompt from the prefix cache costs readers a hundredth of what it did."""
    work, dear = _last(cached, change=change), _last(uncached, change=change)
    print(f"interference cached {work.interference_mean}, uncached {dear.interference_mean}")

    assert work.interference_mean is not None
    assert dear.interference_mean is not None
    assert work.interference_mean < 0.05 * dear.interference_mean
    assert work.interference_mean < 0.2


def test_decoding_alone_is_no_interference(server: VllmServer, cached: Recording) -> None:
    """Two readers without any prompt beside them: the ratio stays at about 0."""
    assert cached.observations
    readers = [decode_stream(f"reader{i}", tokens=600, seed=20 + i, salt="alone") for i in range(2)]
    alone = record(server.url, [("load", readers)], canary=NO_CANARY)
    for name, change in (("plugin", without()), ("balance", BALANCE)):
        work = _last(alone, change=change)
        print(f"{name}: interference {work.interference_mean}, prefill {work.prefill_totals}")
        assert work.interference_mean is not None
        assert work.interference_mean < 0.1


@pytest.fixture(scope="module")
def twice(cached: Recording, server: VllmServer) -> Recording:
    """Two different long prompts one after the other beside a reader each, judged by one sidecar."""
    assert cached.observations
    return record(
        server.url,
        [
            ("earlier", [decode_stream("reader", tokens=500, salt="one"), _long("one", seed=8)]),
            ("load", [decode_stream("reader", tokens=500, salt="two"), _long("two", seed=9)]),
        ],
        canary=NO_CANARY,
    )


def _long(salt: str, *, seed: int) -> Request:
    return long_prompt("long", salt=salt, seed=seed, after="reader", after_tokens=100)


@pytest.mark.parametrize("change", [pytest.param(without(), id="plugin"), pytest.param(BALANCE, id="balance")])
def test_backlog_falls_and_its_eta_is_right(
    twice: Recording, change: Callable[[EngineCounters], EngineCounters]
) -> None:
    """The backlog falls; the ETA is absent until the pace is known, and on the next prompt right from the start."""
    first, second = (_to_go(twice, twice.streams[f"{phase}/long"], change) for phase in ("earlier", "load"))

    assert first[0][2] is None
    for rows in (first, second):
        backlogs = [backlog for _, backlog, _ in rows]
        assert all(after < before for before, after in pairwise(backlogs))
        known = [(to_go, eta) for to_go, _, eta in rows if eta is not None]
        assert len(known) >= 3
        # The end of a step is known to a poll only, which is much of what is left at the end.
        assert all(eta == pytest.approx(to_go, rel=0.25, abs=0.75) for to_go, eta in known)
        assert median(abs(eta / to_go - 1) for to_go, eta in known) < 0.15
    assert all(eta is not None for _, _, eta in second)


def _to_go(
    recording: Recording, stream: Stream, change: Callable[[EngineCounters], EngineCounters]
) -> list[tuple[float, float, float | None]]:
    """Seconds to the first token, backlog and its ETA whenever the backlog had moved."""
    done = stream.reads[0].at
    scrapes = [
        seen.at for seen in _samples(recording) if seen.lane is not Lane.DETECTION and stream.sent < seen.at < done
    ]
    rows: list[tuple[float, float, float | None]] = []
    for at, seen in zip(scrapes, judged(recording, [at + 0.01 for at in scrapes], change=change), strict=True):
        work = seen.engines[0].work
        if work is not None and work.backlog and (not rows or work.backlog != rows[-1][1]):
            rows.append((done - at, work.backlog, work.backlog_eta))
    for to_go, backlog, eta in rows:
        print(f"{backlog:6.0f} tokens to go: {to_go:5.2f} s, ETA {'unknown' if eta is None else f'{eta:5.2f} s'}")
    return rows


def _mix(name: str) -> list[Request]:
    """A dozen requests, 0.7 s apart, beside a reader who decodes."""

    def one(i: int, **more: Any) -> Request:
        return Request(name=f"{name}-{i}", salt=name, delay=0.7 * i, **{"tokens": 40, **more})

    plans: dict[str, Callable[[int], Request]] = {
        "random": lambda i: one(i, prompt_tokens=300 + 211 * i % 1_700, seed=50 + i),
        "shared-prefix": lambda i: one(i, prompt_tokens=1_500 + 97 * i % 900, seed=3),
        "repeats": lambda i: one(i, prompt_tokens=1_400, seed=4 + i % 3),
        "aborts": lambda i: one(
            i, prompt_tokens=900 + 400 * i % 2_000, seed=90 + i, tokens=60, timeout=1.2 if i % 3 == 2 else 60.0
        ),
    }
    return [decode_stream("reader", tokens=900, salt=f"{name}-reader"), *(plans[name](i) for i in range(12))]


def test_estimates_against_the_truth_over_four_mixes(
    server: VllmServer, uncached: Recording, cached: Recording
) -> None:
    """The write counter is exact, the balance close, and both far better than the rate of booked prompt tokens."""
    ladder = PrefillLadder()
    for earlier in (uncached, cached):
        _rows(ladder, earlier)
    print(f"{'mix':<14} {'evidence':<11} {'mean':>7} {'error':>7} {'r':>6} {'bias':>7}")
    for name in ("random", "shared-prefix", "repeats", "aborts"):
        recording = record(server.url, [("load", _mix(name))], canary=NO_CANARY)
        figures = _accuracy(_rows(ladder, recording))
        for evidence, (average, error, r, bias) in figures.items():
            print(f"{name:<14} {evidence:<11} {average:7.0f} {error:7.1f} {r:6.3f} {bias:+7.1%}")
        average, error, r, bias = figures["balance"]
        # An abort frees memory in the interval in which others take some: polls three steps apart see the sum alone,
        # and what one interval is given too little the next one gets.
        correlated, apart = (0.7, 0.35) if name == "aborts" else (0.9, 0.25)
        assert r > correlated, name
        assert error < apart * average, name
        assert abs(bias) < 0.15, name
        assert figures["mfu"][1] <= max(2.0, 0.02 * average), name
        assert figures["naive"][1] > (1.5 if name == "aborts" else 2) * error, name


def _rows(ladder: PrefillLadder, recording: Recording) -> list[dict[str, float]]:
    """Prompt tokens of every poll interval by evidence, `plugin` being the truth and `naive` what was booked."""
    cache = next(seen.caches["0"] for seen in recording.observations if isinstance(seen, ServerFacts))
    rows: list[dict[str, float]] = []
    prompt_before: float | None = None
    for sample in _samples(recording):
        counters = sample.engines["0"]
        seen = ladder.scraped(counters, sample.at, cache=cache)
        if counters.first_tokens is None or counters.prompt_tokens is None:
            continue
        booked = None if prompt_before is None else counters.prompt_tokens - prompt_before
        prompt_before = counters.prompt_tokens
        if seen is None or booked is None or Evidence.PLUGIN not in seen.estimates:
            continue
        rows.append({**{str(rung): tokens for rung, tokens in seen.estimates.items()}, "naive": booked})
    return rows


def _accuracy(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float, float, float]]:
    """Mean tokens, mean error, correlation and bias per poll interval, by evidence."""
    figures = {}
    for evidence in ("mfu", "balance", "naive"):
        pairs = [(row["plugin"], row[evidence]) for row in rows if evidence in row]
        truth, told = [true for true, _ in pairs], [value for _, value in pairs]
        error = mean(abs(true - value) for true, value in pairs)
        figures[evidence] = (mean(truth), error, correlation(truth, told), sum(told) / sum(truth) - 1)
    return figures


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_advised_budget_keeps_steps_inside_the_objective(
    vllm_environment: Environment, idle: Recording, server: VllmServer, tmp_path: Path
) -> None:
    """With the advised token budget at most a tenth of the mixed steps exceed D; with the old one most did."""
    assert idle.observations
    objective = 0.25
    before = record(server.url, [("load", _three_prompts("before"))], canary=NO_CANARY, slo={"itl_seconds": objective})
    work = _last(before, change=BALANCE)
    print(f"model {work.model}")
    assert work.budget is not None
    server.kill()
    advised = work.budget.batched_tokens
    with VllmServer(
        vllm_environment,
        tmp_path,
        model="small",
        flags=(*FLAGS, "--max-num-seqs", str(min(advised, 16))),
        variables=mounted(tmp_path / "plugin"),
        max_num_batched_tokens=advised,
    ) as restarted:
        after = record(restarted.url, [("load", _three_prompts("after"))], canary=NO_CANARY)
    old, new = _share_above(before, objective), _share_above(after, objective)
    print(f"D = {objective} s: advised {work.budget}; mixed steps above D: {old:.0%} before, {new:.0%} after")
    _draw(before, after, objective, Path(".out"))

    assert old > 0.5
    assert new <= 0.1


def _three_prompts(salt: str) -> list[Request]:
    """Enough mixed steps for a fit: three long prompts, one after the other, beside one reader."""
    prompts = [long_prompt("long", salt=salt, seed=61, after="reader", after_tokens=500)]
    prompts += [
        long_prompt(f"long{i}", salt=salt, seed=61 + i, after="long" + (str(i - 1) if i > 1 else "")) for i in (1, 2)
    ]
    return [decode_stream("reader", tokens=2_500, salt=f"{salt}-reader"), *prompts]


def _draw(before: Recording, after: Recording, objective: float, folder: Path) -> None:
    """A picture of step time against prefill tokens, old and new budget, with the fitted line; SVG, for the docs."""
    folder.mkdir(exist_ok=True)
    work = _last(before, change=BALANCE)
    assert work.model is not None
    points = [(*point, colour) for run, colour in ((before, "#b45309"), (after, "#0369a1")) for point in _steps(run)]
    widest, tallest = max(p for p, _, _ in points) * 1.05, max(t for _, t, _ in points) * 1.05

    def place(tokens: float, seconds: float) -> tuple[float, float]:
        return 60 + 560 * tokens / widest, 340 - 300 * seconds / tallest

    base = (work.model.base or 0.0) + (work.model.per_decoder or 0.0)
    shapes = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.6"/>'
        for tokens, seconds, colour in points
        for x, y in [place(tokens, seconds)]
    ]
    for q, b in work.model.per_token.items():
        (x0, y0), (x1, y1) = place(0, base), place(widest, base + b * widest)
        shapes.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#475569"/>')
        shapes.append(f'<text x="{x1 - 40:.0f}" y="{max(y1, 20) + 14:.0f}" font-size="11">b{q * 100:.0f}</text>')
    (x0, y0), (x1, _) = place(0, objective), place(widest, objective)
    shapes.append(
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y0:.1f}" stroke="#be123c" stroke-dasharray="6 4"/>'
    )
    shapes.append(
        f'<text x="{x0 + 4:.0f}" y="{y0 - 5:.0f}" font-size="11" fill="#be123c">objective {objective} s</text>'
    )
    shapes.extend(
        f'<text x="{place(tokens, 0)[0] - 10:.0f}" y="358" font-size="11">{tokens}</text>'
        for tokens in range(0, int(widest) + 1, 100)
    )
    shapes.extend(
        f'<text x="24" y="{place(0, tenths / 10)[1] + 4:.0f}" font-size="11">{tenths / 10:.1f}</text>'
        for tenths in range(0, int(tallest * 10) + 1, 2)
    )
    (folder / "step-time.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 380" font-family="sans-serif">'
        '<rect width="640" height="380" fill="white"/>'
        + "".join(shapes)
        + '<text x="210" y="375" font-size="12">prefill tokens in the step</text>'
        '<text x="8" y="20" font-size="12">step, seconds (brown: budget 512; blue: the advised budget)</text></svg>\n'
    )


def _steps(recording: Recording) -> Iterator[tuple[float, float]]:
    """Prefill tokens and seconds of the mixed steps between two scrapes, from the plugin; of several the mean."""
    samples = [sample.engines["0"].plugin for sample in _samples(recording) if sample.engines["0"].plugin]
    for before, after in pairwise(samples):
        n, p, t = (_moment(after, "mixed", term) - _moment(before, "mixed", term) for term in "npt")
        if n > 0:
            yield p / n, t / n


def _share_above(recording: Recording, objective: float) -> float:
    """Share of the reader's gaps during the long prompts that exceeded the objective: each is one mixed step."""
    reader = recording.streams["load/reader"]
    others = [stream for name, stream in recording.streams.items() if name.startswith("load/long")]
    inside = [
        b.at - a.at
        for a, b in pairwise(reader.reads)
        if any(other.sent < a.at and b.at <= (other.ended or 0) for other in others)
    ]
    return sum(gap > objective for gap in inside) / len(inside)
