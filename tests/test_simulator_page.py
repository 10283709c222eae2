import re
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as text_families

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.drive import play
from stallwatch.simulator.exposition import Family, Kind, Page, labels, number
from stallwatch.simulator.load import Load, Users
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.world import World

GOLDEN = Path(__file__).parent / "golden" / "vllm"


def _world(config: EngineConfig | None = None, server: ServerConfig | None = None) -> World:
    """A server after a little traffic, as the real one's page is captured."""
    scenario = Scenario(
        name="page",
        sentence="",
        duration=20.0,
        engine=config or EngineConfig(max_model_len=16384),
        server=server or ServerConfig(),
        load=Load(users=(Users(count=2, prompt_tokens=50, output_tokens=100),)),
    )
    return play(scenario)


def _page(config: EngineConfig | None = None, server: ServerConfig | None = None) -> str:
    return _world(config, server).page.render()


def _like(real: str) -> str:
    """A simulated page with the same optional families."""
    return _page(server=ServerConfig(plugin="stallwatch_plugin_" in real, created_series="_created" in real))


def _goldens(*, filtered: bool) -> list[Path]:
    """Pages of the release that is simulated: whole ones, or answers to a request for a few names."""
    found = sorted(GOLDEN.glob("0.32*.prom"))
    return [path for path in found if ("name[]=" in path.read_text().partition("\n")[0]) is filtered]


# Families of features that are not simulated.
_FOREIGN = ("vllm:tool_call_parser_invocations",)

each_real_page = pytest.mark.parametrize(
    "real", [pytest.param(p.read_text(), id=p.stem) for p in _goldens(filtered=False)]
)
each_real_answer = pytest.mark.parametrize(
    "real", [pytest.param(p.read_text(), id=p.stem) for p in _goldens(filtered=True)]
)


def test_real_pages_are_there_to_compare_with() -> None:
    """Without pages of a real server the comparisons below would compare nothing."""
    assert _goldens(filtered=False) != []
    assert _goldens(filtered=True) != []


def test_openmetrics_is_that_of_the_real_page() -> None:
    """The other format has the same families, in the same order, with `_created` among the lines of each child."""
    real = next(iter(sorted(GOLDEN.glob("0.32*.openmetrics")))).read_text()
    simulated = _world(server=ServerConfig(plugin="stallwatch_plugin_" in real)).page.render(openmetrics=True)

    assert _order(simulated) == _order(real)
    assert simulated.splitlines()[-1] == real.splitlines()[-1] == "# EOF"
    line = 'vllm_prompt_tokens_by_source_created{engine="0",model_name="tiny",source="local_compute"}'
    assert [_before(page, line) for page in (simulated, real)] == [line.replace("_created", "_total")] * 2


def _before(page: str, series: str) -> str:
    """The series on the line before."""
    lines = [text.rpartition(" ")[0] for text in page.splitlines()]
    return lines[lines.index(series) - 1]


@each_real_answer
def test_a_filtered_answer_has_the_same_lines(real: str) -> None:
    """The same names give the same series and the same comments; only the order of families is nobody's business."""
    names = frozenset(re.findall(r"name\[\]=([\w:]+)", real.partition("\n")[0]))
    world = play(Scenario(name="page", sentence="", engine=EngineConfig(max_model_len=16384)), until=1.0)

    assert _lines(world.page.render(names)) == _lines(real.partition("\n")[2])


def _lines(page: str) -> list[str]:
    return sorted(line if line.startswith("#") else line.rpartition(" ")[0] for line in page.splitlines())


def _shape(page: str) -> dict[str, tuple[str, str, frozenset[tuple[str, ...]]]]:
    """Families by name: type, help, and the sets of label names of their samples."""
    shapes = {}
    for family in text_families(page):
        if family.name.startswith(_FOREIGN):
            continue
        names = frozenset(tuple(sorted(sample.labels)) for sample in family.samples)
        shapes[family.name] = (family.type, family.documentation, names)
    return shapes


def _edges(page: str) -> dict[str, list[str]]:
    edges: dict[str, list[str]] = defaultdict(list)
    for family in text_families(page):
        for sample in family.samples:
            if sample.name.endswith("_bucket") and sample.labels["le"] not in edges[family.name]:
                edges[family.name].append(sample.labels["le"])
    return dict(edges)


def _order(page: str) -> list[str]:
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    return [name for name in names if not name.startswith(_FOREIGN)]


@each_real_page
def test_the_families_are_those_of_the_real_page_in_its_order(real: str) -> None:
    """Nothing is missing and nothing invented, `_created` included; HTTP children exist once they were used."""
    used = [name for name in _order(_like(real)) if not name.startswith("http_") or name in _order(real)]
    assert used == _order(real)


@each_real_page
def test_types_help_and_label_names_are_the_real_ones(real: str) -> None:
    """Readers look for labels, and sometimes for units in the help text."""
    expected, simulated = _shape(real), _shape(_like(real))

    # A family of the HTTP layer that nothing has used yet has no samples, hence no labels to compare.
    assert expected == {
        name: shape if expected[name][2] else (*shape[:2], frozenset())
        for name, shape in simulated.items()
        if name in expected
    }


@each_real_page
def test_bucket_edges_are_the_real_ones(real: str) -> None:
    """Every histogram has the real server's edges, those that depend on the model's length included."""
    expected, simulated = _edges(real), _edges(_like(real))

    assert expected == {name: edges for name, edges in simulated.items() if name in expected}
    assert len(expected) > 15


@each_real_page
def test_the_page_is_about_as_large_as_the_real_one(real: str) -> None:
    """What a scrape costs depends on its size."""
    assert 0.8 < len(_like(real)) / len(real) < 1.25


def test_the_page_is_read_by_the_strict_parser() -> None:
    """The text format is well-formed, and the counters in it are those of the world."""
    world = _world()

    read = {sample.name: sample.value for family in text_families(world.page.render()) for sample in family.samples}

    assert read["vllm:generation_tokens_total"] == sum(s.emitted_tokens for s in world.steps())


def test_features_add_their_families_and_only_theirs() -> None:
    """Drafts, KV fetch stages and the plugin's families are on the page only where they are configured."""
    plain = _shape(_page())
    spec = _shape(_page(EngineConfig(max_model_len=16384, num_speculative_tokens=2)))
    connector = Scenario(name="x", sentence="", server=ServerConfig(kv_connector=True, plugin=True))
    with_connector = _shape(play(connector).page.render())

    assert {n for n in spec.keys() - plain.keys() if not n.endswith("_created")} == {
        f"vllm:spec_decode_num_{n}" for n in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    }
    added = with_connector.keys() - plain.keys()
    assert "vllm:num_requests_kv_fetch_by_stage" in added
    assert all(n.startswith(("stallwatch_plugin_", "vllm:num_requests_kv_fetch")) for n in added)


def test_created_series_can_be_switched_off() -> None:
    """As `PROMETHEUS_DISABLE_CREATED_SERIES` does."""
    quiet = Scenario(name="x", sentence="", server=ServerConfig(created_series=False))

    assert "_created" not in play(quiet).page.render()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (3.25, "3.25"),
        (123456.0, "123456.0"),
        (1234567.0, "1.234567e+06"),
        (1e6, "1e+06"),
        (1e-7, "1e-07"),
        (float("inf"), "+Inf"),
    ],
)
def test_numbers_are_spelled_as_the_python_client_spells_them(value: float, text: str) -> None:
    """Integers have a fraction, large numbers an exponent."""
    assert number(value) == text


def test_a_filter_names_samples_not_families() -> None:
    """The base name of a histogram gives nothing, the name of one of its series that series."""
    family = Family("vllm:x", Kind.HISTOGRAM, help="X.", edges=(1.0,), created=5.0)
    family.observe(labels(engine=0), 0.5)
    page = Page([family])

    assert page.render(frozenset({"vllm:x"})) == ""
    assert [line for line in page.render(frozenset({"vllm:x_sum"})).splitlines() if line[0] != "#"] == [
        'vllm:x_sum{engine="0"} 0.5'
    ]
    assert 'vllm:x_created{engine="0"} 5.0' in page.render(frozenset({"vllm:x_created"}))
