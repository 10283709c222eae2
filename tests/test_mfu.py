import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.analysis.mfu import MfuEstimator, MfuInterval
from stallwatch.observations import EngineCounters
from tests.test_balance import recorded

START = EngineCounters(
    running=0.0,
    waiting=0.0,
    prefix_queries=1000.0,
    prefix_hits=100.0,
    prompt_local_compute=900.0,
    generation_tokens=500.0,
    first_tokens=10.0,
    itl_count=490.0,
    preemptions=0.0,
    write_bytes=0.0,
)


class Model:
    """Counters of an engine whose write counter follows the formula exactly."""

    def __init__(self, alpha: int, beta: int, start: EngineCounters = START) -> None:
        self.alpha, self.beta = alpha, beta
        self.now = replace(start, write_bytes=float(5000 * alpha))

    def poll(
        self,
        *,
        decodes: int = 0,
        prefill: int = 0,
        chunks: int = 0,
        admitted: int = 0,
        booked: int = 0,
        firsts: int = 0,
        running: int = 1,
        recompute: int = 0,
    ) -> EngineCounters:
        """Moves the counters: tokens computed now, prompts admitted and booked now."""
        now = self.now
        rows = decodes + chunks
        written = self.alpha * (decodes + prefill + recompute) + self.beta * rows
        self.now = replace(
            now,
            running=float(running),
            write_bytes=(now.write_bytes or 0) + written,
            generation_tokens=(now.generation_tokens or 0) + decodes + firsts,
            itl_count=(now.itl_count or 0) + decodes,
            first_tokens=(now.first_tokens or 0) + firsts,
            prefix_queries=(now.prefix_queries or 0) + admitted,
            prompt_local_compute=(now.prompt_local_compute or 0) + booked,
        )
        return self.now


def warm_up(model: Model) -> Iterator[EngineCounters]:
    """Two idle-to-idle stretches with a prompt each, and decode-only intervals between."""
    yield model.now
    for prompt, chunks in ((700, 2), (1300, 3)):
        yield model.poll(prefill=512, chunks=1, admitted=prompt)
        yield model.poll(prefill=prompt - 512, chunks=chunks - 1, booked=prompt, firsts=1, decodes=4)
        for _ in range(3):
            yield model.poll(decodes=11)
        yield model.poll(decodes=2, running=0)


def calibrated(model: Model) -> MfuEstimator:
    estimator = MfuEstimator()
    for before, after in pairwise(list(warm_up(model))):
        estimator.update(before, after)
    return estimator


def after(estimator: MfuEstimator, model: Model, **moved: int) -> MfuInterval | None:
    before = model.now
    return estimator.update(before, model.poll(**moved))


@pytest.mark.parametrize(("alpha", "beta"), [(26624, 640), (40960, 32064), (3_407_872, 16_032), (999_983, 7)])
def test_it_finds_both_factors_of_the_model(alpha: int, beta: int) -> None:
    """Two stretches with a prompt and a few decode-only polls give both factors to the byte."""
    estimator = calibrated(Model(alpha, beta))
    assert (estimator.alpha, estimator.beta) == (alpha, beta)


@pytest.mark.parametrize(
    ("decodes", "prefill", "chunks"),
    [(0, 0, 0), (7, 0, 0), (1, 511, 1), (40, 8152, 9), (0, 100_000, 200), (3, 2045, 4)],
)
def test_tokens_and_chunks_are_read_off_exactly(decodes: int, prefill: int, chunks: int) -> None:
    """What is left after the decodes has one solution in whole tokens and chunks."""
    model = Model(26624, 640)
    seen = after(calibrated(model), model, decodes=decodes, prefill=prefill, chunks=chunks, admitted=prefill)
    assert seen == MfuInterval(prefill_tokens=prefill, chunks=chunks, exact=True)


def test_nothing_is_said_before_it_has_calibrated_itself() -> None:
    """Until both factors are known there is no estimate, however much was written."""
    model = Model(26624, 640)
    estimator = MfuEstimator()
    said = [estimator.update(a, b) for a, b in pairwise(list(warm_up(model))[:8])]
    assert said == [None] * 7
    assert estimator.alpha is None


def test_a_restart_calibrates_again() -> None:
    """After the counters fell nothing is said until the new process, perhaps with another model, is known."""
    estimator = calibrated(Model(26624, 640))
    fresh = Model(51200, 1280, start=replace(START, write_bytes=0.0, generation_tokens=0.0, first_tokens=0.0))
    assert estimator.update(Model(26624, 640).now, replace(fresh.now, write_bytes=0.0)) is None
    forgotten = estimator.alpha
    for before, now in pairwise(list(warm_up(fresh))):
        estimator.update(before, now)
    assert (forgotten, estimator.alpha, estimator.beta) == (None, 51200, 1280)


def test_recompute_counts_as_scheduled_and_does_not_spoil_what_was_learned() -> None:
    """After a preemption the recomputed tokens are scheduled prompt tokens; the factors stay."""
    model = Model(26624, 640)
    estimator = calibrated(model)
    seen = after(estimator, model, decodes=5, recompute=300, chunks=1)
    assert seen is not None
    assert seen.prefill_tokens == 300
    model.now = replace(model.now, preemptions=1.0)
    for before, now in pairwise([model.now, *warm_up(model)]):
        estimator.update(before, now)
    assert (estimator.alpha, estimator.beta) == (26624, 640)


def test_a_decode_without_an_output_is_not_prefill() -> None:
    """The last step of an aborted decode is work of one token in one chunk and is left out."""
    model = Model(26624, 640)
    seen = after(calibrated(model), model, decodes=5, prefill=2, chunks=2)
    assert seen is not None
    assert seen.prefill_tokens == 0


def test_an_aborted_prompt_does_not_teach_a_wrong_factor() -> None:
    """Work that is never booked leaves its stretch out of the calibration."""
    model = Model(26624, 640)
    estimator = MfuEstimator()
    polls = [model.now]
    for aborted in (3000, 5000, 7000):
        polls.append(model.poll(prefill=512, chunks=1, admitted=aborted))
        polls.append(model.poll(admitted=200, prefill=200, chunks=1, booked=200, firsts=1))
        polls += [model.poll(decodes=9) for _ in range(4)]
        polls.append(model.poll(decodes=1, running=0))
    polls += list(warm_up(model))[1:]
    for before, now in pairwise(polls):
        estimator.update(before, now)
    assert estimator.alpha in {None, 26624}


def test_a_counter_that_stays_at_zero_says_nothing() -> None:
    """A model that vLLM has no formula for leaves the counter at 0: unknown, not zero."""
    idle = replace(START, write_bytes=0.0)
    busy = replace(idle, generation_tokens=600.0, itl_count=590.0)
    assert MfuEstimator().update(idle, busy) is None
    assert MfuEstimator().update(replace(idle, write_bytes=None), busy) is None


@pytest.mark.parametrize("name", ["plugin-abort", "plugin-mixed"])
def test_it_is_exact_on_the_real_engine(name: str) -> None:
    """On recorded runs of the real vLLM every interval equals the plugin's truth, but for a token an aborted decode."""
    estimator = MfuEstimator()
    compared = exact = 0
    for before, now in pairwise(recorded(name)):
        seen = estimator.update(before.counters, now.counters)
        if seen is not None:
            compared += 1
            assert seen.prefill_tokens == pytest.approx(now.truth - before.truth, abs=2)
            exact += seen.prefill_tokens == now.truth - before.truth
    assert (estimator.alpha, estimator.beta) == (26624, 640)
    assert compared > 80
    assert exact >= 0.95 * compared


@settings(max_examples=60, deadline=None)
@given(st.integers(1_000, 5_000_000), st.integers(1, 100_000), st.integers(0, 2**32))
def test_every_model_is_read_back(alpha: int, beta: int, seed: int) -> None:
    """Whatever the two factors, a calibrated estimator explains each interval to the byte, or says it does not."""
    model = Model(alpha, beta)
    estimator = calibrated(model)
    rng = random.Random(seed)
    for _ in range(10):
        chunks = rng.randint(0, 20)
        prefill = chunks * rng.randint(2, 500)
        seen = after(estimator, model, decodes=rng.randint(0, 60), prefill=prefill, chunks=chunks)
        if estimator.alpha is not None:
            assert seen is not None
            assert seen.prefill_tokens == pytest.approx(prefill, abs=2 + chunks * max(1.0, beta / alpha))
