"""How long a metrics page takes: vLLM's to parse, beside the client library's parser, and ours to make."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

from stallwatch.sources.engine_page import resolve, wanted
from stallwatch.sources.exposition import Exposition
from tests.bench.figures import Figure, milliseconds, rank, spread

REAL_PAGE = Path(__file__).parents[1] / "golden" / "vllm" / "0.32.0.prom"
ROUNDS = 40


def parsing() -> list[Figure]:
    """Both parsers over the same page, in turn."""
    body = REAL_PAGE.read_bytes()
    text = body.decode()
    ours = Exposition(wanted, resolve)
    cold = _seconds(lambda: ours.parse(body))
    mine, theirs = [], []
    gc.disable()  # what it collects is not this page's
    try:
        for _ in range(ROUNDS):
            mine.append(_seconds(lambda: ours.parse(body)))
            theirs.append(_seconds(lambda: list(text_string_to_metric_families(text))))
    finally:
        gc.enable()
    lines = len(text.splitlines())
    ratios = [their / my for my, their in zip(mine, theirs, strict=True)]
    return [
        Figure(f"parse vLLM's page of {lines} lines", f"{spread(mine)}; the first time {milliseconds(cold)}"),
        Figure("the same, `text_string_to_metric_families`", spread(theirs)),
        Figure(
            "how many times as long",
            f"{median(ratios):.0f} ({rank(ratios, 0.25):.0f} to {rank(ratios, 0.75):.0f})",
            "10",
        ),
    ]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
