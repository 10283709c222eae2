import json
import re

import pytest

from stallwatch.catalogue import CATALOGUE, Kind, reference


def test_names_are_unique_and_well_formed() -> None:
    """Names follow Prometheus' conventions: our prefix, base units, `_total` on counters and nothing else."""
    names = [spec.name for spec in CATALOGUE]

    assert len(names) == len(set(names))
    for spec in CATALOGUE:
        assert re.fullmatch(r"stallwatch_[a-z0-9_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER), spec.name
        assert not re.search(r"_(ms|milliseconds|percent|mb)\b", spec.name)
        assert not {"quantile", "le", "pod", "namespace", "node", "job", "instance"} & set(spec.labels)


def test_the_plugin_shares_no_name_with_us() -> None:
    """Both are scraped beside each other: one shared name would double every sum."""
    assert not [spec.name for spec in CATALOGUE if spec.name.startswith("stallwatch_plugin_")]


def test_every_metric_says_what_it_means() -> None:
    """Help is a sentence."""
    for spec in CATALOGUE:
        assert spec.help.endswith("."), spec.name
        assert len(spec.help) > 20, spec.name
        assert "\n" not in spec.help


def test_reference_has_every_metric_in_each_style() -> None:
    """Text, markdown and JSON list the same metrics."""
    listed = {row["name"] for row in json.loads(reference("json"))["metrics"]}

    assert listed == {spec.name for spec in CATALOGUE}
    for style in ("text", "markdown"):
        assert all(spec.name in reference(style) for spec in CATALOGUE)
    with pytest.raises(ValueError, match="no such style: 'html'"):
        reference("html")
