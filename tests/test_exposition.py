import math
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from stallwatch.sources import exposition
from stallwatch.sources.exposition import Exposition, Page

Series = tuple[str, frozenset[tuple[str, str]]]

REAL_PAGE = Path(__file__).parent / "golden" / "vllm" / "0.32.0.prom"


def parser(*names: str) -> Exposition[Series]:
    """A parser of the named families, or of all, that resolves a series to its own name and labels."""
    return Exposition(lambda name: not names or name in names, lambda name, labels: (name, frozenset(labels.items())))


def values(page: Page[Series]) -> dict[Series, float]:
    return dict(page.samples.values())


def series(name: str, **labels: str) -> Series:
    return name, frozenset(labels.items())


def bits(value: float) -> bytes:
    """A float so that NaN equals NaN and -0 does not equal 0."""
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("a 1", {series("a"): 1.0}, id="no labels"),
        pytest.param("a{} 1", {series("a"): 1.0}, id="empty braces"),
        pytest.param('a{x="1",y="2"} 3', {series("a", x="1", y="2"): 3.0}, id="labels"),
        pytest.param('a{y="2",x="1"} 3', {series("a", x="1", y="2"): 3.0}, id="other order"),
        pytest.param('a{x="1",} 3', {series("a", x="1"): 3.0}, id="trailing comma"),
        pytest.param('a { x = "1" , y = "2" } 3', {series("a", x="1", y="2"): 3.0}, id="blanks everywhere"),
        pytest.param('a{x="1"}3', {series("a", x="1"): 3.0}, id="no blank before the value"),
        pytest.param('a{x="1"}\t3', {series("a", x="1"): 3.0}, id="tab"),
        pytest.param('  a{x="1"}   3  ', {series("a", x="1"): 3.0}, id="blanks around"),
        pytest.param('a{x="1"} 3\r', {series("a", x="1"): 3.0}, id="CRLF"),
        pytest.param(r'a{x="q\"u\\o\nt\e"} 3', {series("a", x='q"u\\o\nt\\e'): 3.0}, id="escapes"),
        pytest.param('a{x="} 7 # {",y="b c"} 3', {series("a", x="} 7 # {", y="b c"): 3.0}, id="syntax in a value"),
        pytest.param('a{x="1"} 3 1700000000000', {series("a", x="1"): 3.0}, id="time stamp"),
        pytest.param('a{x="1"} 3\t-1', {series("a", x="1"): 3.0}, id="tab before the time stamp"),
        pytest.param('a{x="1"} 3 # {id="a b"} 0.5 1.7e9', {series("a", x="1"): 3.0}, id="exemplar"),
        pytest.param('a 3 17 # {id="}"} 0.5', {series("a"): 3.0}, id="time stamp and exemplar"),
        pytest.param("a +Inf", {series("a"): math.inf}, id="+Inf"),
        pytest.param("a -Inf", {series("a"): -math.inf}, id="-Inf"),
        pytest.param("a 1.5e-07", {series("a"): 1.5e-7}, id="exponent"),
        pytest.param('{"a b.c",x="1"} 3', {series("a b.c", x="1"): 3.0}, id="quoted name"),
        pytest.param('a{"x.y"="1"} 3', {("a", frozenset({("x.y", "1")})): 3.0}, id="quoted label name"),
        pytest.param(
            'a{x="ÄÖ \u2028\x0b\x85"} 3', {series("a", x="ÄÖ \u2028\x0b\x85"): 3.0}, id="line ends of Unicode"
        ),
        pytest.param("vllm_x 1", {series("vllm:x"): 1.0}, id="underscore for colon"),
        pytest.param("ray_vllm:x 1", {series("vllm:x"): 1.0}, id="Ray's prefix"),
        pytest.param("ray_vllm_x 1", {series("vllm:x"): 1.0}, id="Ray's prefix and underscore"),
        pytest.param("# HELP a 1", {}, id="comment"),
        pytest.param("", {}, id="empty line"),
        pytest.param("\r", {}, id="empty CRLF line"),
    ],
)
def test_reads_every_spelling(line: str, expected: dict[Series, float]) -> None:
    """A line is read alike the first time, by the strict reader, and again, from the cache."""
    exposition_parser = parser()

    first = exposition_parser.parse(line.encode())
    again = exposition_parser.parse(line.encode())

    assert (values(first), first.garbage_lines) == (expected, 0)
    assert (values(again), again.garbage_lines) == (expected, 0)


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a ",
        "a 1_000",
        "a one",
        "a 1 2 3",
        "a 1 # comment",
        "1a 1",
        'a{x="1} 3',
        'a{x="1"',
        'a{x="1",,y="2"} 3',
        'a{x="1" y="2"} 3',
        'a{x="1",x="2"} 3',
        "a{x=1} 3",
        "a{x} 3",
        'a{1x="1"} 3',
        'a{"b"} 3',
        '{x="1"} 3',
        "{} 3",
        '{"a","b"} 3',
        "<html>",
        "\x00\x00",
        'a{x="' + "y" * exposition.MAX_LINE + '"} 1',
    ],
)
def test_garbage_is_counted_and_skipped(line: str) -> None:
    """A line that is none is one line of garbage and takes nothing else with it."""
    page = parser().parse(f"before 1\n{line}\nafter 2\n".encode())

    assert (values(page), page.garbage_lines) == ({series("before"): 1.0, series("after"): 2.0}, 1)


def test_a_known_series_does_not_bend_a_strange_line() -> None:
    """A line whose left part is known but whose right part is not a plain number is read strictly all the same."""
    exposition_parser = parser()
    exposition_parser.parse(b'a{x="1"} 1\n')

    tab = exposition_parser.parse(b'a{x="1"} 2\t1700\n')
    broken = exposition_parser.parse(b'a{x="1"} 2_0\n')
    stamped = exposition_parser.parse(b'a{x="1"} 3 1700\n')

    assert values(tab) == {series("a", x="1"): 2.0}
    assert (values(broken), broken.garbage_lines) == ({}, 1)
    assert values(stamped) == {series("a", x="1"): 3.0}


def test_a_series_that_comes_twice_counts_once() -> None:
    """The last of two equal series wins, as nothing says that they add up."""
    page = parser().parse(b'a{x="1"} 1\na{x="1"} 5\n')

    assert values(page) == {series("a", x="1"): 5.0}


def test_only_wanted_families_are_read() -> None:
    """Unwanted names are noted as such, and a broken label in them is none of our business."""
    page = parser("a").parse(b'a 1\nb{x="1"} 2\nb_created 3\nc{broken 4\na_created 1\n')

    assert values(page) == {series("a"): 1.0}
    assert page.unwanted == {"b", "b_created", "c", "a_created"}
    assert page.garbage_lines == 0


def test_a_useless_series_of_a_wanted_family_is_dropped() -> None:
    """What `resolve` has no use for is not in the page, the first time and from the cache."""
    exposition_parser: Exposition[str] = Exposition(lambda _: True, lambda _, labels: labels.get("x"))

    pages = [exposition_parser.parse(b'a{x="1"} 1\na{y="1"} 2\n').samples for _ in range(2)]

    assert [list(page.values()) for page in pages] == [[("1", 1.0)]] * 2


def test_an_info_line_with_many_labels() -> None:
    """The cache settings of vLLM arrive as one line of more labels than anybody would think of."""
    labels = {f"setting_{number}": f'value "{number}"' for number in range(60)}
    inner = ",".join('{}="{}"'.format(key, value.replace('"', '\\"')) for key, value in labels.items())

    page = parser().parse(f"vllm:cache_config_info{{{inner}}} 1.0".encode())

    assert values(page) == {series("vllm:cache_config_info", **labels): 1.0}


def test_slices_cut_at_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the slices are, no line is cut, not even one longer than a slice."""
    monkeypatch.setattr(exposition, "SLICE_BYTES", 10)
    lines = [f'a{{x="{number:03d}"}} {number}' for number in range(50)]

    page = parser().parse("\n".join(lines).encode())

    assert values(page) == {series("a", x=f"{number:03d}"): float(number) for number in range(50)}
    assert page.garbage_lines == 0


def test_a_page_of_garbage_is_not_read_to_its_end() -> None:
    """After a thousand lines of garbage nothing good is expected."""
    page = parser().parse(b"!\n" * 1_000_000)

    assert (page.gave_up, page.garbage_lines) == (True, exposition.MAX_GARBAGE)


def test_a_flood_of_series_makes_the_family_unknown_and_no_other() -> None:
    """A family with more series than are read is marked, and its neighbours stay whole."""
    flood = "".join(f'flood{{x="{number}"}} 1\n' for number in range(exposition.MAX_SERIES_A_NAME + 10))

    page = parser().parse((flood + "calm 2\n").encode())

    assert page.overfull == {"flood"}
    assert values(page)[series("calm")] == 2.0


def test_floods_of_labels_do_not_fill_memory() -> None:
    """Labels that change with every page are forgotten: keys and memory stay bounded."""
    exposition_parser = parser()
    tracemalloc.start()
    try:
        for round_ in range(8):
            lines = "".join(f'a{{request="{round_}-{number}-{"z" * 60}"}} 1\n' for number in range(3000))
            exposition_parser.parse(lines.encode())
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"kept after 24,000 distinct series: {kept / 2**20:.1f} MiB, {exposition_parser.keys} keys")

    assert exposition_parser.keys <= 2 * exposition.MAX_KEYS
    assert kept < 12 * 2**20


def test_series_that_are_no_longer_seen_are_forgotten() -> None:
    """The keys of a server that was replaced leave the cache after a while, and those in use stay."""
    exposition_parser = parser()
    exposition_parser.parse(b'old{x="1"} 1\nkept 1\n')

    for _ in range(2 * exposition.FORGET_AFTER_PAGES):
        exposition_parser.parse(b"kept 1\n")

    assert exposition_parser.keys == 1


_free = lambda name: not name.startswith("__") and name not in {"le", "quantile"}
_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,12}", fullmatch=True).filter(_free)
_utf8_names = st.text(min_size=1, max_size=8).filter(_free)
_texts = st.text(max_size=20)
_numbers = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def registries(draw: st.DrawFn) -> CollectorRegistry:
    """Anything an application may have registered and counted."""
    registry = CollectorRegistry()
    for name in draw(st.lists(st.one_of(_names, _utf8_names), min_size=1, max_size=4, unique_by=str.lower)):
        labels = draw(st.lists(st.one_of(_names, _utf8_names), max_size=3, unique=True))
        # The index keeps the families' own suffixes from meeting each other.
        full = f"{draw(st.sampled_from(['', 'vllm:', 'x:']))}{name}_{len(list(registry.collect()))}"
        kind = draw(st.sampled_from([Counter, Gauge, Histogram, Summary]))
        metric = kind(full, draw(_texts), labels, registry=registry)
        for _ in range(draw(st.integers(0, 3))):
            child = metric.labels(*[draw(_texts) for _ in labels]) if labels else metric
            if isinstance(child, Counter):
                child.inc(abs(draw(_numbers.filter(lambda number: not math.isnan(number)))))
            elif isinstance(child, Gauge):
                child.set(draw(_numbers))
            else:
                child.observe(draw(_numbers))
    return registry


def reference(text: str) -> dict[Series, bytes]:
    """The same page as the client library's own parser reads it."""
    return {
        (exposition.normalised(sample.name), frozenset(sample.labels.items())): bits(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@settings(max_examples=100, deadline=None)
@given(registries(), st.sampled_from([openmetrics.UNDERSCORES, openmetrics.ALLOWUTF8, openmetrics.VALUES]))
def test_reads_what_the_client_library_writes(registry: CollectorRegistry, escaping: str) -> None:
    """Whatever prometheus_client renders is read to the values that its own parser reads, twice over."""
    body = generate_latest(registry, escaping)
    exposition_parser = parser()

    try:
        expected = reference(body.decode())
    except ValueError:  # names that it writes and will not read itself
        reject()

    for _ in range(2):
        page = exposition_parser.parse(body)
        assert {key: bits(value) for key, value in values(page).items()} == expected
        assert page.garbage_lines == 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.text(alphabet='ab_:{}",=\\ \t\r#1.eEnN+-', max_size=60).map(str.encode),
            st.sampled_from([b'a{x="1"} 1', b"a 1", b"# TYPE a gauge", b'a{x="1"} 1 # {y="z"} 1', b'{"a"} 1']),
        ),
        max_size=12,
    )
)
def test_never_raises(lines: list[bytes]) -> None:
    """No bytes whatever make the parser raise, and what it read once it reads again."""
    body = b"\n".join(lines)
    exposition_parser = parser()

    first, again = exposition_parser.parse(body), exposition_parser.parse(body)

    assert {key: bits(value) for key, value in values(first).items()} == {
        key: bits(value) for key, value in values(again).items()
    }
    assert first.garbage_lines == again.garbage_lines


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_names, _texts, max_size=4), _numbers, st.booleans(), st.booleans())
def test_reads_generated_lines(labels: dict[str, str], value: float, stamped: bool, exemplar: bool) -> None:  # noqa: FBT001
    """Any label values survive escaping, with a time stamp and an exemplar behind them or not."""
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
    escaped = [f'{key}="{text.translate(escapes)}"' for key, text in labels.items()]
    line = f"a{{{','.join(escaped)}}} {value!r}" + " 1700" * stamped + ' # {id="} 1"} 1' * exemplar

    page = parser().parse(line.encode())

    read = {key: bits(number) for key, number in values(page).items()}
    assert read == {series("a", **labels): bits(value)}


def test_speed_on_a_real_page() -> None:
    """A real page is read many times faster than by the client library's parser."""
    body = REAL_PAGE.read_bytes()
    text = body.decode()
    from stallwatch.sources.engine_page import resolve, wanted  # noqa: PLC0415

    ours = Exposition(wanted, resolve)
    ours.parse(body)

    def best(repeat: int, work: object) -> float:
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            work()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    mine = best(30, lambda: ours.parse(body))
    theirs = best(5, lambda: list(text_string_to_metric_families(text)))
    print(
        f"{len(text.splitlines())} lines: {mine * 1e3:.2f} ms, prometheus_client {theirs * 1e3:.1f} ms, "
        f"{theirs / mine:.0f} times"
    )

    assert theirs > 2 * mine
