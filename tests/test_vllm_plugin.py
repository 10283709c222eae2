import ast
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from stallwatch import vllm_plugin
from stallwatch.catalogue import CATALOGUE
from stallwatch.vllm_plugin import Board, StepLogger
from tests.vllm.environment import find

SOURCE = Path(vllm_plugin.__file__)


@dataclass
class Details:
    """What vLLM 0.26 and later say of a step."""

    num_ctx_requests: int = 0
    num_ctx_tokens: int = 0
    num_generation_requests: int = 0
    num_generation_tokens: int = 0
    elapsed_ms: float = 0.0
    is_dummy: bool = False
    iteration_index: int = 0


@dataclass
class Stats:
    """The part of vLLM's scheduler statistics that is read."""

    iteration_details: Details | None = None
    num_running_reqs: int = 1


CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(
        max_num_batched_tokens=512,
        max_num_seqs=128,
        long_prefill_token_threshold=0,
        enable_chunked_prefill=True,
        async_scheduling=False,
        policy="fcfs",
    ),
    cache_config=SimpleNamespace(block_size=128, enable_prefix_caching=True),
    observability_config=SimpleNamespace(enable_logging_iteration_details=True),
)


def step(prefill: int = 0, decode: int = 0, milliseconds: float = 10.0, **more: Any) -> Stats:
    return Stats(
        Details(
            num_ctx_requests=1 if prefill else 0,
            num_ctx_tokens=prefill,
            num_generation_tokens=decode,
            num_generation_requests=decode,
            elapsed_ms=milliseconds,
            **more,
        )
    )


@dataclass
class Shown:
    """A process with a registry of its own."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    board: Board = field(init=False)

    def __post_init__(self) -> None:
        self.board = Board(self.registry, multiprocess=False)

    def logger(self, index: int = 0, config: Any = CONFIG) -> StepLogger:
        return StepLogger(config, index, board=self.board)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"stallwatch_plugin_{name}", {"engine": "0", **labels})


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_the_sums_are_those_of_the_steps(shown: Shown) -> None:
    """Count, sums, squares and products by phase are exactly what a fit over the steps needs."""
    logger = shown.logger()
    for stats in (step(0, 3, 20), step(500, 3, 400), step(509, 3, 500), step(512, 0, 300)):
        logger.record(stats, None)
    mixed = {
        term: shown.value("step_moments_total", phase="mixed", term=term) for term in ("n", "p", "d", "pp", "dd", "pd")
    }
    assert mixed == {"n": 2, "p": 1009, "d": 6, "pp": 500**2 + 509**2, "dd": 18, "pd": 3 * 1009}
    assert shown.value("step_moments_total", phase="mixed", term="t") == pytest.approx(0.9)
    assert shown.value("step_moments_total", phase="mixed", term="pt") == pytest.approx(500 * 0.4 + 509 * 0.5)
    assert shown.value("step_moments_total", phase="mixed", term="dt") == pytest.approx(2.7)
    assert shown.value("step_moments_total", phase="prefill", term="p") == 512
    assert shown.value("step_moments_total", phase="decode", term="tt") == pytest.approx(0.02**2)
    assert shown.value("prefill_chunks_total") == 3


def test_histograms_are_cumulative_and_agree_with_the_sums(shown: Shown) -> None:
    """A bucket counts all steps up to its edge; sum and count are those of the sums."""
    logger = shown.logger()
    for stats in (step(0, 3, 20), step(512, 3, 400), step(513, 3, 500)):
        logger.record(stats, None)
    assert shown.value("step_prefill_tokens_bucket", le="0.0") == 1
    assert shown.value("step_prefill_tokens_bucket", le="512.0") == 2
    assert shown.value("step_prefill_tokens_bucket", le="+Inf") == 3
    assert shown.value("step_prefill_tokens_count") == 3
    assert shown.value("step_prefill_tokens_sum") == 1025
    assert shown.value("step_duration_seconds_bucket", phase="mixed", le="0.5") == 2
    assert shown.value("step_duration_seconds_sum", phase="mixed") == pytest.approx(0.9)


def test_dummy_and_empty_steps_are_not_counted(shown: Shown) -> None:
    """Steps that data-parallel ranks make to keep in step, and messages without a step, leave no trace."""
    logger = shown.logger()
    for stats in (step(0, 1, is_dummy=True), step(0, 0), Stats(None), None):
        logger.record(stats, None)
    assert shown.value("step_prefill_tokens_count") == 0
    assert shown.value("errors_total") == 0


def test_the_settings_of_the_scheduler_are_shown(shown: Shown) -> None:
    """The knobs that shape interference are labels; what a version lacks is empty."""
    shown.logger()
    older = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=2048))
    shown.logger(1, older)
    page = generate_latest(shown.registry).decode()
    rows = [line for line in page.splitlines() if line.startswith("stallwatch_plugin_scheduler_info{")]
    assert len(rows) == 2
    assert all(
        part in rows[0]
        for part in ('max_num_batched_tokens="512"', 'async_scheduling="false"', 'block_size="128"', 'policy="fcfs"')
    )
    assert 'max_num_batched_tokens="2048"' in rows[1]
    assert 'max_num_seqs=""' in rows[1]


def test_several_engines_share_the_families(shown: Shown) -> None:
    """There is a logger for each data-parallel rank; each counts for itself in one family."""
    loggers = [shown.logger(index) for index in range(3)]
    for index, logger in enumerate(loggers):
        logger.record(step(100 * (index + 1), 1), None, engine_idx=index)
    seen = [
        shown.registry.get_sample_value("stallwatch_plugin_step_prefill_tokens_sum", {"engine": str(index)})
        for index in range(3)
    ]
    assert seen == [100, 200, 300]


def test_a_filtered_page_finds_the_families(shown: Shown) -> None:
    """The names that a filtered scrape asks for are known before anything was counted."""
    logger = shown.logger()
    logger.record(step(500, 2), None)
    restricted = shown.registry.restricted_registry(["stallwatch_plugin_step_moments_total"])
    page = generate_latest(restricted).decode()
    assert 'stallwatch_plugin_step_moments_total{engine="0",phase="mixed",term="p"} 500.0' in page
    assert "stallwatch_plugin_errors" not in page


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(SimpleNamespace(), id="no attribute"),
        pytest.param(SimpleNamespace(iteration_details=SimpleNamespace()), id="no fields"),
        pytest.param(Stats(Details(num_ctx_tokens="many")), id="wrong type"),  # type: ignore[arg-type]
        pytest.param(7, id="nonsense"),
    ],
)
def test_no_exception_leaves_the_plugin(shown: Shown, broken: Any) -> None:
    """Whatever vLLM hands over, record returns and counts the error: an exception would end every request."""
    logger = shown.logger()
    logger.record(broken, None)
    logger.record(step(1, 1), None)
    assert shown.value("errors_total") == 1
    assert shown.value("step_prefill_tokens_count") == 1


def test_a_broken_configuration_does_not_stop_vllm(shown: Shown) -> None:
    """An exception in a stat logger's constructor would keep vLLM from starting."""

    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    logger = shown.logger(config=Hostile())
    logger.record(step(1, 1), None)
    logger.log()
    logger.log_engine_initialized()
    logger.record_sleep_state(1, 0)
    assert shown.value("errors_total") == 1


@pytest.mark.parametrize(
    ("config", "stats"),
    [
        pytest.param(
            SimpleNamespace(
                observability_config=SimpleNamespace(enable_logging_iteration_details=False),
            ),
            Stats(None),
            id="flag off",
        ),
        pytest.param(SimpleNamespace(), SimpleNamespace(), id="before 0.14"),
        pytest.param(CONFIG, SimpleNamespace(), id="before 0.26"),
    ],
)
def test_without_step_details_it_does_nothing_and_says_so_once(
    shown: Shown, caplog: pytest.LogCaptureFixture, config: Any, stats: Any
) -> None:
    """Where the flag is missing or vLLM too old nothing is counted, and one warning says what to do."""
    with caplog.at_level(logging.WARNING):
        logger = shown.logger(config=config)
        for _ in range(5):
            logger.record(stats, None)
    assert [record.name for record in caplog.records] == ["stallwatch.vllm_plugin"]
    assert shown.value("step_prefill_tokens_count") == 0


def test_the_names_are_ours_alone() -> None:
    """No family holds vLLM's name, which vLLM would unregister, and none is one of the sidecar's own."""
    own = {family.name for family in _families()}
    catalogue = {spec.name for spec in CATALOGUE}
    assert own
    assert all(name.startswith("stallwatch_plugin_") and "vllm" not in name for name in own)
    assert not own & catalogue
    assert not any(name.startswith("stallwatch_plugin_") for name in catalogue)


def _families() -> list[Any]:
    registry = CollectorRegistry()
    board = Board(registry, multiprocess=False)
    StepLogger(CONFIG, 0, board=board)
    return list(registry.collect())


def test_it_imports_nothing_of_the_rest_and_nothing_that_vllm_lacks() -> None:
    """The module stands alone: the standard library, prometheus_client, and vLLM itself where it is installed."""
    allowed = {*sys.stdlib_module_names, "prometheus_client", "vllm"}
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert (node.module or "").split(".")[0] in allowed


WORKER = """
import asyncio, sys
from types import SimpleNamespace as N
sys.path.insert(0, sys.argv[1])
from stallwatch.vllm_plugin import StepLogger
flags = N(enable_logging_iteration_details=True)
loggers = [StepLogger(N(observability_config=flags), index) for index in range(2)]
def stats(p, d, running=1):
    details = N(num_ctx_tokens=p, num_generation_tokens=d, num_ctx_requests=1, elapsed_ms=10.0, is_dummy=False)
    return N(iteration_details=details, num_running_reqs=running)
async def serve():
    for _ in range(int(sys.argv[2])):
        loggers[0].record(stats(100, 2), None)
        loggers[1].record(stats(0, 1), None)
    loggers[1].record(stats(0, 1, running=0), None)
    await asyncio.sleep(0.2)
asyncio.run(serve())
"""

READER = """
import sys, json
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_add_up(tmp_path: Path) -> None:
    """In prometheus_client's multiprocess mode the sums of all processes appear on one page."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for times in (3, 4):
        command = [sys.executable, "-c", WORKER, str(SOURCE.parent.parent), str(times)]
        subprocess.run(command, env=environment, check=True)
    read = subprocess.run([sys.executable, "-c", READER], env=environment, check=True, capture_output=True, text=True)
    page = read.stdout
    assert 'stallwatch_plugin_step_prefill_tokens_sum{engine="0"} 700.0' in page
    assert 'stallwatch_plugin_step_prefill_tokens_bucket{engine="0",le="128.0"} 7.0' in page
    assert 'stallwatch_plugin_step_moments_total{engine="0",phase="mixed",term="pd"} 1400.0' in page
    assert 'stallwatch_plugin_step_moments_total{engine="1",phase="decode",term="n"} 9.0' in page
    assert 'stallwatch_plugin_errors_total{engine="0"} 0.0' in page


def bench_step_cost(logger: StepLogger, *, steps: int = 20_000) -> float:
    """Microseconds that one step costs: the best of five rounds, half of the steps with prefill."""
    mixed, decode = step(511, 16, 40), step(0, 16, 12)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(steps // 2):
            logger.record(mixed, None)
            logger.record(decode, None)
        best = min(best, (time.perf_counter() - begin) / steps * 1e6)
    return best


def test_a_step_costs_a_few_microseconds(shown: Shown) -> None:
    """One step costs under 5 us, about one as measured; the assertion allows five times that for a busy machine."""
    cost = bench_step_cost(shown.logger())
    print(f"\n{cost:.2f} us a step")
    assert cost < 25


CONTRACT = """
import json, sys
from importlib.metadata import entry_points
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group
from vllm.v1.metrics.loggers import StatLoggerBase, load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, SchedulerIterationDetails, SchedulerStats
from types import SimpleNamespace as N
from prometheus_client import REGISTRY
[factory] = load_stat_logger_plugin_factories()
assert issubclass(factory, StatLoggerBase)
flags = N(enable_logging_iteration_details=True)
logger = factory(N(observability_config=flags), 0)
details = SchedulerIterationDetails(1, 1, 511, 3, 3, 40.0)
logger.record(SchedulerStats(iteration_details=details), IterationStats(), mm_cache_stats=None, engine_idx=0)
logger.record(SchedulerStats(), None)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
unregister_vllm_metrics()
print(json.dumps([
    REGISTRY.get_sample_value("stallwatch_plugin_step_prefill_tokens_sum", {"engine": "0"}),
    REGISTRY.get_sample_value("stallwatch_plugin_errors_total", {"engine": "0"}),
]))
"""


@pytest.mark.vllm
def test_the_real_vllm_loads_it_from_a_mounted_directory(tmp_path: Path) -> None:
    """A directory on PYTHONPATH with the package and its entry point is all that vLLM 0.32 needs."""
    environment = find()
    if environment is None:
        pytest.fail("no whole vLLM environment; run: python3 tests/vllm/environment.py")
    package, info = tmp_path / "stallwatch", tmp_path / "stallwatch-0.1.0.dist-info"
    package.mkdir()
    info.mkdir()
    for name in ("__init__.py", "vllm_plugin.py"):
        (package / name).write_text((SOURCE.parent / name).read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stallwatch\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.stat_logger_plugins]\nstallwatch = stallwatch.vllm_plugin:StepLogger\n"
    )
    ran = subprocess.run(
        [str(environment.python), "-c", CONTRACT],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"},
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == [511.0, 0.0]
