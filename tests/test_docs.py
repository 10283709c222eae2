import re
from pathlib import Path

import pytest

from tests.artifacts.test_rules import anchors
from tests.docs import ROOT, generated

PAGES = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def test_generated_parts_are_fresh() -> None:
    """The metric and configuration references are what the code says now; `make docs` writes them."""
    assert [str(path.relative_to(ROOT)) for path, text in generated().items() if path.read_text() != text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links between pages name files that exist."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_anchors_exist(page: Path) -> None:
    """Links into a page name a heading that it has."""
    links = re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text())

    assert [
        (target, anchor)
        for target, anchor in links
        if anchor not in anchors((page.parent / target if target else page).read_text())
    ] == []
