"""The engine source: one scrape of vLLM's metrics page a call, as small as will do.

The first page is always a full one: it says which names this release has and what the cache looks like. Then the
server is asked for samples by name, `/metrics/?name[]=...`: without the trailing slash vLLM ignores the filter, and
with several API server processes it answers a filtered request with an empty page. Both show at once, because names of
the full page do not come back or others come along; then full pages are read, slowly, and the filter is tried again.

What a server sends is untrusted: size and time are bounded here, lines, series and engines where they are read.
"""

import asyncio
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
import structlog

from stallwatch.observations import EngineCounters, EngineSample, Failure, Lane, ServerFacts
from stallwatch.scheduling import SourceError
from stallwatch.settings import EngineSettings
from stallwatch.sources import families, lanes
from stallwatch.sources.engine_page import BEYOND, MAX_ENGINES, Known, Meaning, Reading, read, resolve, wanted
from stallwatch.sources.exposition import SLICE_BYTES, Exposition, Page, normalised
from stallwatch.sources.http import Target, network_failures, plain, refusal

log = structlog.get_logger()

MAX_PAGE_BYTES: Final = 10_000_000
MAX_VERSION_BYTES: Final = 64 * 1024
MAX_PLUGIN_NAMES: Final = 64
FILTER_RETRY_SECONDS: Final = 300.0
FAULT_PAUSE_SECONDS: Final = 1.0  # between polls of a server that answers, but wrongly
VERSION_TIMEOUT_SECONDS: Final = 1.0

_PARTS_NAMED: Final = 8  # of what could not be read, in one line of the log

_HEADERS: Final = {"Accept": "text/plain;version=0.0.4"}
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count|created)\Z")
_PREFIX_HELP = re.compile(rb"^# HELP \S*gpu_prefix_cache_queries\S* ([^\n]*)", re.MULTILINE)
_VLLM_TYPE = re.compile(rb"^# TYPE (?:ray_)?vllm[:_](?:num_requests|generation_tokens)", re.MULTILINE)

# A server that does not understand the filter refuses it in one of these ways, while its plain page works.
_FILTER_REFUSALS = frozenset({Failure.REDIRECT, Failure.REJECTED})

# After these the next answer may come from another process.
_RELEARN = frozenset({Failure.REFUSED, Failure.DNS, Failure.CUT, Failure.SERVER_ERROR, Failure.MALFORMED})

# These come at once, and would come four times a second; a refused connection costs nobody anything.
_PAUSE_AFTER = frozenset(Failure) - {Failure.REFUSED, Failure.TIMEOUT, Failure.CUT}


@dataclass(frozen=True, slots=True)
class _Answer:
    sent_at: float
    at: float
    body: bytes
    page: Page[Meaning]


class EngineSource:
    """One vLLM server's metrics. `poll` is made for the polling loop and waits by itself when lanes are stretched."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        settings: EngineSettings,
        *,
        clock: Callable[[], float],
        emit_facts: Callable[[ServerFacts], None] | None = None,
    ) -> None:
        self._session = session
        self._target = target
        self._timeout = settings.timeout_seconds
        self._pace = lanes.Pace(settings.interval_seconds, settings.full_interval_seconds, settings.max_scrape_duty)
        self._clock = clock
        self._emit_facts = emit_facts
        self._parser: Exposition[Meaning] = Exposition(wanted, resolve)
        self._costs = lanes.Costs()
        self._sent = lanes.Sent()
        self._not_before = -math.inf
        self._moving = False
        self._last: EngineSample | None = None
        self._offered: frozenset[str] = frozenset()
        self._known = Known()
        self._unfiltered_until = -math.inf
        self._filter_works: bool | None = None
        self._facts: ServerFacts | None = None
        self._version: str | None = None
        self._asked_for: dict[Lane, tuple[frozenset[str], frozenset[str]]] = {}  # what was offered, what to ask for
        self._engines: set[str] = set()  # names that are passed on
        self._unread: frozenset[str] = frozenset()  # what of the pages could not be used, as told

    @property
    def deadline_seconds(self) -> float:
        """Timeout for the polling loop: `poll` bounds its own requests, and may wait for its turn before them."""
        longest_wait = max(lanes.UNFILTERED_FLOOR, lanes.DETECTION_FLOOR, FAULT_PAUSE_SECONDS, self._pace.interval)
        return longest_wait + 2 * self._timeout + VERSION_TIMEOUT_SECONDS + 1.0

    @property
    def plan(self) -> lanes.Plan:
        """How often each lane is asked for at the moment."""
        full = self._costs.of(Lane.FULL)
        if not self._filtering(self._clock()):
            return lanes.unfiltered_plan(self._pace, full=full)
        return lanes.plan(
            self._pace,
            detection=self._costs.of(Lane.DETECTION),
            estimator=self._costs.of(Lane.ESTIMATOR),
            full=full,
        )

    def cost_seconds(self, lane: Lane) -> float:
        """Median time that the server takes for this lane; 0 while it was never asked for."""
        return self._costs.of(lane)

    @property
    def filter_works(self) -> bool | None:
        """Whether the server honours the filter; None before the first filtered request."""
        return self._filter_works

    @property
    def facts(self) -> ServerFacts | None:
        """The last facts read."""
        return self._facts

    async def poll(self) -> EngineSample:
        """One scrape of the lane that is due. Raises `SourceError`."""
        lane = await self._turn()
        try:
            sample, reading = await self._scrape(lane)
        except SourceError as error:
            self._failed(error, lane)
            raise
        self._learn(sample)
        if sample.lane is Lane.FULL:
            await self._tell_facts(sample, reading)
        return sample

    async def ask(self, lane: Lane) -> EngineSample:
        """One scrape of this lane, now, after a first `poll`: for whoever measures what lanes cost.

        Raises `SourceError`.
        """
        sample, _ = await self._scrape(lane)
        self._learn(sample)
        return sample

    async def _turn(self) -> Lane:
        now = self._clock()
        at, lane = lanes.due(self.plan, self._sent, now, moving=self._moving)
        at = max(at, self._not_before)
        if at > now:
            await asyncio.sleep(at - now)
        return lane if self._filtering(at) else Lane.FULL

    def _filtering(self, now: float) -> bool:
        return now >= self._unfiltered_until

    async def _scrape(self, lane: Lane) -> tuple[EngineSample, Reading]:
        asked = frozenset[str]()
        if lane is not Lane.FULL:
            asked = self._names(lane)
            try:
                answer = await self._get(lane, asked)
            except SourceError as error:
                if error.reason not in _FILTER_REFUSALS:
                    raise
            else:
                reading = read(answer.page, lane, self._known)
                foreign = _foreign(answer.page.unwanted | reading.offered, asked)
                if not foreign and (asked & self._offered) <= reading.offered:
                    self._filter_works = True
                    return self._sample(answer, reading, lane), reading
                if foreign and self._offered <= reading.offered:
                    # The whole page came: nothing is gained by asking again.
                    return self._full(answer, asked)
        return self._full(await self._get(Lane.FULL, frozenset()), asked)

    def _full(self, answer: _Answer, refused: frozenset[str]) -> tuple[EngineSample, Reading]:
        """Reads a full page; `refused` are the names of the filtered request that it came for instead, if any."""
        known = Known(prefix_in_blocks=_prefix_in_blocks(answer.body))
        reading = read(answer.page, Lane.FULL, known)
        _check(answer, reading)
        self._known = replace(known, caches=reading.caches)
        if refused & self._offered & reading.offered:
            if self._filter_works is not False:
                log.warning("metrics filter not honoured, reading full pages", url=str(self._target.base))
            self._filter_works = False
            self._unfiltered_until = answer.at + FILTER_RETRY_SECONDS
        self._offered = reading.offered
        return self._sample(answer, reading, Lane.FULL), reading

    def _sample(self, answer: _Answer, reading: Reading, lane: Lane) -> EngineSample:
        engines, left_out = self._admitted(reading.engines)
        self._tell_unread(reading.unread | left_out, lane)
        self._costs.add(lane, answer.at - answer.sent_at)
        self._sent = self._sent.after(lane, answer.sent_at)
        return EngineSample(
            sent_at=answer.sent_at,
            at=answer.at,
            lane=lane,
            engines=engines,
            missing=reading.missing,
            filtered=self._filtering(answer.at),
            asleep=reading.asleep,
            process_start_unix=reading.process_start,
            bytes=len(answer.body),
            garbage_lines=answer.page.garbage_lines,
        )

    def _admitted(self, engines: Mapping[str, EngineCounters]) -> tuple[Mapping[str, EngineCounters], frozenset[str]]:
        """The engines that are passed on, and what to say of the others.

        Whoever takes samples remembers each engine for ever, so a server whose pages name ever other ones must not
        fill our memory: the first names stand, as many as a page may have.
        """
        if engines.keys() <= self._engines:
            return engines, frozenset()
        for engine in engines:
            if len(self._engines) < MAX_ENGINES:
                self._engines.add(engine)
        admitted = {engine: counters for engine, counters in engines.items() if engine in self._engines}
        beyond = frozenset({BEYOND}) if len(admitted) < len(engines) else frozenset[str]()
        return admitted, beyond

    def _tell_unread(self, unread: frozenset[str], lane: Lane) -> None:
        if new := sorted(unread - self._unread):
            log.warning(
                "parts of the metrics page cannot be read",
                parts=new[:_PARTS_NAMED],
                parts_count=len(new),
                hint="what they say is not known; is there a proxy that changes the page?",
            )
        elif self._unread and not unread and lane is Lane.FULL:
            log.info("the whole metrics page can be read again")
            self._unread = frozenset()
        self._unread |= unread

    def _names(self, lane: Lane) -> frozenset[str]:
        """Sample names to ask for: of each quantity the one that this server has, or all while it has shown none.

        Names that it does not have cost a server nothing, and a family of
        which no series exists yet is found when it appears.
        """
        known = self._asked_for.get(lane)
        if known is None or known[0] is not self._offered:
            known = self._asked_for[lane] = self._offered, self._choose_names(lane)
        return known[1]

    def _choose_names(self, lane: Lane) -> frozenset[str]:
        names: set[str] = set()
        for row in families.rows_of(lane):
            spelled = [alias.name for alias in row.aliases]
            names.update(next(([name] for name in spelled if name in self._offered), spelled))
        if lane is not Lane.DETECTION:
            names.update((families.PROCESS_START, families.SLEEP_STATE))
            plugin = sorted(name for name in self._offered if name.startswith(families.PLUGIN_PREFIX))
            names.update(plugin[:MAX_PLUGIN_NAMES])
        return frozenset(names)

    async def _get(self, lane: Lane, names: frozenset[str]) -> _Answer:
        if lane is Lane.FULL:
            path = "/metrics"
        else:
            path = "/metrics/?" + "&".join(f"name%5B%5D={name}" for name in sorted(names))
        try:
            async with asyncio.timeout(self._timeout):
                sent_at = self._clock()
                body = await self._fetch(path, MAX_PAGE_BYTES)
                at = self._clock()
        except TimeoutError as error:
            raise SourceError(Failure.TIMEOUT, f"no answer within {self._timeout:g} s") from error
        page: Page[Meaning] = Page()
        for _ in self._parser.slices(body, page):
            if len(body) > SLICE_BYTES:
                await asyncio.sleep(0)
        return _Answer(sent_at, at, body, page)

    async def _fetch(self, path: str, limit: int) -> bytes:
        target = self._target
        with network_failures():
            async with self._session.get(
                target.url(path),
                headers={**_HEADERS, **target.key.headers()},
                allow_redirects=False,
                ssl=target.tls(),
                server_hostname=target.server_name,
            ) as response:
                if error := refusal(response.status, _status_hint(response.status)):
                    if response.status == 401:
                        target.key.refused()
                    response.close()
                    raise error
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    response.close()
                    raise SourceError(Failure.MALFORMED, f"the answer is compressed unasked: {plain(encoding, 20)}")
                body = bytearray()
                while len(body) <= limit and (chunk := await response.content.readany()):
                    body += chunk
                if len(body) > limit:
                    response.close()
                    raise SourceError(Failure.TOO_LARGE, f"more than {limit:,} bytes")
                return bytes(body)

    def _learn(self, sample: EngineSample) -> None:
        last, self._last = self._last, sample
        self._not_before = -math.inf
        if last is None:
            self._moving = True
            return
        self._moving = lanes.moved(last.engines, sample.engines)
        if lanes.went_back(last.engines, sample.engines) or self._other_process(sample.process_start_unix):
            self._version = None
            if sample.lane is not Lane.FULL:
                self._forget()

    def _other_process(self, started: float | None) -> bool:
        known = self._facts.process_start_unix if self._facts is not None else None
        return started is not None and known is not None and started != known

    def _failed(self, error: SourceError, lane: Lane) -> None:
        now = self._clock()
        if error.reason in _RELEARN:
            self._forget()
        elif error.reason is Failure.TIMEOUT and self._offered:
            # A frozen server must not find a heap of full pages to answer when it wakes.
            self._sent = self._sent.after(lane, now)
        if error.reason in _PAUSE_AFTER:
            self._not_before = now + FAULT_PAUSE_SECONDS

    def _forget(self) -> None:
        """The next answer may come from another release: what this one has is learnt anew from a full page."""
        self._sent = replace(self._sent, full=-math.inf)
        self._offered = frozenset()
        self._unfiltered_until = -math.inf
        self._filter_works = None
        self._version = None

    async def _tell_facts(self, sample: EngineSample, reading: Reading) -> None:
        known = self._facts
        if (
            known is not None
            and not sample.filtered
            and sample.at < known.at + self._pace.full_interval
            and (known.model_name, known.process_start_unix, known.caches)
            == (reading.model_name, reading.process_start, reading.caches)
        ):
            return  # one lane of full pages comes more often than facts are worth telling
        self._version = self._version or await self._ask_version()
        self._facts = ServerFacts(
            at=sample.at,
            version=self._version,
            model_name=reading.model_name,
            process_start_unix=reading.process_start,
            caches=reading.caches,
        )
        if self._emit_facts is not None:
            self._emit_facts(self._facts)

    async def _ask_version(self) -> str | None:
        """The server's release, or None: it is good to know and not worth a failed poll."""
        try:
            async with asyncio.timeout(VERSION_TIMEOUT_SECONDS):
                answer = json.loads(await self._fetch("/version", MAX_VERSION_BYTES))
        except (SourceError, TimeoutError, ValueError, RecursionError):
            return None
        version = answer.get("version") if isinstance(answer, dict) else None
        return version[:64] if isinstance(version, str) and version.isprintable() and version else None


def _foreign(names: set[str] | frozenset[str], asked: frozenset[str]) -> bool:
    """Whether a page has families that were not asked for."""
    allowed = _allowed(asked)
    return any(_SUFFIX.sub("", normalised(name)) not in allowed for name in names)


@functools.lru_cache(maxsize=8)
def _allowed(asked: frozenset[str]) -> frozenset[str]:
    return frozenset(_SUFFIX.sub("", name) for name in asked)


def _status_hint(status: int) -> str:
    if status == 404:
        return "no metrics here: is engine.url right?"
    if 300 <= status < 400:
        return "redirects are not followed: engine.url must name the server itself"
    return ""


def _prefix_in_blocks(body: bytes) -> bool | None:
    if b"gpu_prefix_cache_queries" not in body:
        return None
    found = _PREFIX_HELP.search(body)
    return b"blocks" in found[1] if found else None


def _check(answer: _Answer, reading: Reading) -> None:
    """Raises for a full page without engines, unless it is vLLM's before its first request, and for much garbage."""
    page, body = answer.page, answer.body
    if not reading.engines and not _VLLM_TYPE.search(body):
        if b"# TYPE " in body or (page.unwanted and not page.garbage_lines):
            raise SourceError(
                Failure.MALFORMED,
                "the metrics page has no engine metrics: is this vLLM, and does it run with --disable-log-stats?",
            )
        what = "this is not a metrics page" if body.strip() else "the metrics page is empty"
        raise SourceError(Failure.MALFORMED, f"{what}: is engine.url right?")
    if page.gave_up:
        raise SourceError(Failure.MALFORMED, f"more than {page.garbage_lines} lines of the page are garbage")
