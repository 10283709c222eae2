"""The live page behind a password, in a real browser."""

import urllib.error
from pathlib import Path

import pytest

from stallwatch.web.credentials import hash_password
from tests.browser.driver import browser
from tests.e2e.processes import free_port, get, process, stallwatch, until

pytestmark = pytest.mark.timeout(300)


def test_whoever_has_the_password_sees_it_live(tmp_path: Path) -> None:
    """The page, its files and its events come with the browser's credentials, and not without; keys open the help."""
    target, port = free_port(), free_port()
    users = tmp_path / "users"
    users.write_text(f"me:{hash_password('sesame')}\n")
    simulate = stallwatch("simulate", "--scenario", "quiet", "--port", str(target))
    run = stallwatch(
        *("run", "--engine.url", f"http://127.0.0.1:{target}", "--web.host", "127.0.0.1", "--web.port", str(port)),
        *("--web.basic_auth_file", str(users)),
    )
    with (
        browser(tmp_path) as page,
        process(simulate, tmp_path / "simulate.log"),
        process(run, tmp_path / "run.log"),
    ):
        until(lambda: get(f"http://127.0.0.1:{port}/livez") == "ok\n", 60, "the sidecar listens")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"http://127.0.0.1:{port}/static/page.js")
        page.open(f"http://me:sesame@127.0.0.1:{port}/")
        page.until("return document.querySelector('#connection').dataset.state === 'live'", seconds=60, what="live")
        page.until("return document.querySelector('#verdict').dataset.state === 'well'", seconds=60, what="a verdict")
        page.press("?")
        opened = page.run("return document.querySelector('#keys').open")
        page.click("#keys button")
        closed = page.run("return document.querySelector('#keys').open")
        complaints = page.complaints()

    assert (opened, closed) == (True, False)
    assert complaints == []
