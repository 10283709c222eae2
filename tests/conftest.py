"""Options of the test run."""

import logging
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog

ALONE = tuple(Path(__file__).parent / folder for folder in ("browser", "e2e"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds our options."""
    parser.addoption("--forbid-skips", action="store_true", help="a test that skips itself fails")
    parser.addoption("--update-golden", action="store_true", help="writes golden files anew instead of comparing")


def pytest_configure() -> None:
    """Takes Ctrl-C again where a shell's `&` has it ignored, which every child would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what runs whole programs in real time: beside other tests it would measure those."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in ALONE):
            item.add_marker(pytest.mark.alone)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure where nothing may be skipped: a gate that skips silently gates nothing."""
    report = yield
    if report.skipped and item.config.getoption("--forbid-skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is forbidden here: {call.excinfo.value if call.excinfo else ''}"
    return report


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands that run in this process configure logging; the next test shall not notice."""
    root, access, loop = logging.getLogger(), logging.getLogger("aiohttp.access"), logging.getLogger("asyncio")
    before = (root.handlers[:], root.level, access.handlers[:], access.propagate, loop.level)
    yield
    root.handlers[:], root.level, access.handlers[:], access.propagate, loop.level = before
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
