"""A real headless Chromium, driven through ChromeDriver by the protocol of WebDriver: JSON over HTTP, no library."""

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.processes import free_port, process, until

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # the tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--no-proxy-server",
    "--force-device-scale-factor=1",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's own name for a reference


class Browser:
    """One window."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        capabilities = {
            "alwaysMatch": {
                "browserName": "chrome",
                "goog:chromeOptions": {"args": list(_ARGUMENTS)},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
        }
        opened = self._call("POST", "/session", {"capabilities": capabilities}, session=False)
        self._session = opened["sessionId"]

    def close(self) -> None:
        """Ends the browser."""
        self._call("DELETE", "")

    def open(self, url: str) -> None:
        """Goes to a page and waits until it has loaded."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """The value that a script returns; `arguments` are its `arguments`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text of the first element that a selector finds; empty when there is none."""
        found = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return str(found)

    def until(self, script: str, *arguments: object, seconds: float, what: str) -> Any:
        """Waits until a script returns something true, and returns it. Raises `AssertionError`."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > deadline:
                said = self.run("return document.body.innerText.slice(0, 300)")
                raise AssertionError(f"not within {seconds:g} s: {what}; the page says: {said!r}; {self.complaints()}")
            time.sleep(0.1)
        return found

    def click(self, selector: str) -> None:
        """Clicks an element as a mouse does."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/click", {})

    def press(self, keys: str) -> None:
        """Types into whatever has the focus; special keys by their WebDriver code points."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keyboard", "actions": actions})

    def move(self, *points: tuple[float, float], held: bool = False) -> None:
        """Moves the mouse from point to point of the window; `held` with its button down in between."""
        actions: list[dict[str, object]] = []
        for place, (x, y) in enumerate(points):
            actions.append({"type": "pointerMove", "duration": 60, "x": round(x), "y": round(y), "origin": "viewport"})
            if held and place == 0:
                actions.append({"type": "pointerDown", "button": 0})
        if held:
            actions.append({"type": "pointerUp", "button": 0})
        pointer = {"pointerType": "mouse"}
        self._act({"type": "pointer", "id": "mouse", "parameters": pointer, "actions": actions})

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """Sets what the page sees of the window, in its own pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip

    def scheme(self, word: str) -> None:
        """What the person prefers: light or dark."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": word}])

    def command(self, name: str, **parameters: object) -> Any:
        """A command of the browser's own protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Writes a PNG of the window, or of the whole page."""
        found = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """What the browser had to complain of since it was last asked: errors of scripts, refused contents."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in {"SEVERE", "WARNING"}]

    def _act(self, source: dict[str, object]) -> None:
        self._call("POST", "/actions", {"actions": [source]})

    def _call(self, method: str, path: str, body: object = None, *, session: bool = True) -> Any:
        address = f"{self._driver}{f'/session/{self._session}' if session else ''}{path}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            address, data=content, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            found = json.load(error)["value"]
            raise AssertionError(f"{found['error']}: {found['message']}") from error


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser while the block runs."""
    port = free_port()
    with process(["chromedriver", f"--port={port}"], folder / "chromedriver.log"):
        address = f"http://127.0.0.1:{port}"
        until(lambda: _ready(address), 60, "ChromeDriver answers")
        window = Browser(address)
        try:
            yield window
        finally:
            window.close()


def _ready(address: str) -> bool:
    with urllib.request.urlopen(f"{address}/status", timeout=5) as answer:
        return bool(json.load(answer)["value"]["ready"])
