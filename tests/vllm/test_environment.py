"""The real vLLM is there, and shows the phenomenon that stallwatch exists for."""

import signal
import time
from collections.abc import Mapping

import pytest

from tests.vllm import load, truth
from tests.vllm.guard import members
from tests.vllm.load import Stream
from tests.vllm.server import VllmServer, sample

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PROMPT_TOKENS = 12_000


def figures(label: str, gaps: list[truth.Gap]) -> str:
    """One line of the table: milliseconds."""
    values = {
        "p50": truth.icl_quantile(gaps, 0.5),
        "p95": truth.icl_quantile(gaps, 0.95),
        "p99": truth.icl_quantile(gaps, 0.99),
        "max": truth.icl_quantile(gaps, 1.0),
        "time-weighted p95": truth.time_weighted_quantile(gaps, 0.95),
    }
    told = ", ".join(f"{name} {1000 * value:.1f}" for name, value in values.items() if value is not None)
    return f"{label:28} {len(gaps):4} gaps: {told} ms"


@pytest.fixture(scope="module")
def beside(vllm_server: VllmServer) -> Mapping[str, Stream]:
    """A victim that decodes all the while, an uncached prompt of 12,000 tokens, and the same prompt from the cache."""
    load.run(vllm_server.url, load.decode_stream("warm", tokens=30))
    return load.run(
        vllm_server.url,
        load.decode_stream(tokens=900),
        load.long_prompt(prompt_tokens=PROMPT_TOKENS, salt="smoke", after="victim", after_tokens=300),
        load.long_prompt("cached", prompt_tokens=PROMPT_TOKENS, salt="smoke", after="long", delay=0.3),
    )


def during(victim: Stream, other: Stream) -> list[truth.Gap]:
    """The victim's gaps that ended between the other's send and its first token."""
    assert other.first_token_wait is not None
    return truth.gaps(victim, window=(other.sent, other.sent + other.first_token_wait))


def test_a_long_prompt_freezes_a_reader(beside: Mapping[str, Stream]) -> None:
    """Beside an uncached prompt, the victim's worst gap is many times its median from before."""
    victim, other = beside["victim"], beside["long"]
    before, frozen = truth.gaps(victim, window=(victim.sent, other.sent)), during(victim, other)
    print(figures("\ndecoding alone", before))
    print(figures("beside 12,000 tokens", frozen))
    print(figures("beside the same, cached", during(victim, beside["cached"])))
    print(
        f"first-token wait: uncached {other.first_token_wait:.2f} s, cached {beside['cached'].first_token_wait:.2f} s"
    )
    missed = truth.missed_seconds([victim], objective=0.1, window=(other.sent, other.reads[0].at))
    print(f"the victim missed 0.1 s for {missed:.2f} of {other.first_token_wait:.2f} s")

    median, worst = truth.icl_quantile(before, 0.5), truth.icl_quantile(frozen, 1.0)
    assert median is not None
    assert worst is not None
    assert worst > 20 * median


def test_the_cached_prompt_is_cached(beside: Mapping[str, Stream]) -> None:
    """The same prompt with the same salt is answered in a fraction of the time."""
    first, again = beside["long"].first_token_wait, beside["cached"].first_token_wait
    assert first is not None
    assert again is not None
    assert again < first / 4


def test_the_load_client_counts_as_vllm_does(vllm_server: VllmServer, beside: Mapping[str, Stream]) -> None:
    """The tokens that the client saw are the tokens that vLLM says it generated and was asked to read."""
    page = vllm_server.metrics()
    seen = sum(stream.tokens for stream in beside.values()) + 30  # the warm-up's
    assert all(stream.outcome == "complete" for stream in beside.values())
    assert sample(page, "vllm:generation_tokens_total", engine="0") == seen
    assert beside["long"].prompt_tokens == PROMPT_TOKENS


def test_a_stopped_engine_core_stops_the_tokens_only(vllm_server: VllmServer) -> None:
    """With EngineCore stopped the API server is healthy and the reader waits; afterwards every token comes."""
    with load.load(vllm_server.url, [load.decode_stream(tokens=400)]) as running:
        running.wait_for_tokens("victim", 50)
        vllm_server.signal_engine(signal.SIGSTOP)
        time.sleep(1.5)
        healthy = vllm_server.healthy()
        vllm_server.signal_engine(signal.SIGCONT)
        victim = running.finish()["victim"]
    worst = truth.icl_quantile(truth.gaps(victim), 1.0)

    assert healthy
    assert worst is not None
    assert worst > 1.4
    assert (victim.tokens, victim.outcome) == (400, "complete")


def test_a_killed_server_leaves_nothing_and_starts_again(vllm_server: VllmServer) -> None:
    """After a kill no process of the group lives, the reader's stream is cut, and the same port serves again."""
    with load.load(vllm_server.url, [load.decode_stream(tokens=4_000)]) as running:
        running.wait_for_tokens("victim", 50)
        group = vllm_server.pid
        vllm_server.kill()
        victim = running.finish()["victim"]
    left = members(group)
    took = vllm_server.start()
    print(f"\nhealthy again after {took:.1f} s")

    assert left == []
    assert victim.outcome == "cut"
    assert vllm_server.healthy()
