import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.protocol import Detokenizer
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.server import serve
from tests import virtual

GOLDEN = Path(__file__).parent / "golden" / "sse"
QUESTION = re.compile(r"POST (/v1/\S+) (?:(\{[^{}]*\}) )?(\{.*\})$", re.MULTILINE)

# Asked of the real server, and not simulated: several answers to one prompt; parsers of reasoning and tool calls.
NOT_SIMULATED = frozenset({"completions-two-choices"})
INTERVAL = re.compile(r"--stream-interval (\d+)")

# Fields whose values are the model's or the clock's own; of all others the value is compared too.
_FREE = frozenset(
    {"id", "created", "text", "content", "token_ids", "prompt_token_ids", "system_fingerprint"}
    | {"prompt_tokens", "total_tokens", "root", "text_offset", "token_logprobs", "tokens", "top_logprobs"}
)


def _skeleton(value: Any, key: str = "") -> Any:
    """Keys in their order, nulls, and every value that does not depend on the model."""
    if value is None:
        return None
    if key in _FREE:
        return type(value).__name__
    if isinstance(value, dict):
        return [(name, _skeleton(inner, name)) for name, inner in value.items()]
    if isinstance(value, list):
        return [_skeleton(inner) for inner in value]
    return value


def _events(raw: str) -> list[Any]:
    payloads = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    return [_skeleton(json.loads(payload)) if payload[0] == "{" else payload for payload in payloads]


def _ask(method: str, path: str, *, server: ServerConfig | None = None, **kwargs: Any) -> tuple[int, str]:
    async def main() -> tuple[int, str]:
        scenario = Scenario(
            name="golden", sentence="", engine=EngineConfig(max_model_len=16384), server=server or ServerConfig()
        )
        loop = asyncio.get_running_loop()
        async with (
            serve(scenario, clock=loop.time) as serving,
            ClientSession() as session,
            session.request(method, serving.url + path, **kwargs) as response,
        ):
            return response.status, await response.text()

    return virtual.run(main())


def _goldens() -> list[Path]:
    found = sorted(GOLDEN.glob("*.txt"))
    parsed = [p for p in found if p.stem.startswith("chat") and "parser" in p.read_text().partition("\n")[0]]
    return [path for path in found if path.stem not in NOT_SIMULATED and path not in parsed]


ANSWERS = json.loads((GOLDEN / "answers.json").read_text())["answers"]


def test_real_streams_are_there_to_compare_with() -> None:
    """Without streams of a real server the comparison below would compare nothing."""
    assert len(_goldens()) >= 5


@pytest.mark.parametrize("golden", [pytest.param(p, id=p.stem) for p in _goldens()])
def test_a_stream_is_field_for_field_that_of_the_real_server(golden: Path) -> None:
    """The same request gets the same events: keys in order, nulls, counts, reasons, the end."""
    raw = golden.read_text()
    question = QUESTION.search(raw)
    assert question is not None, "the capture does not say what was asked"

    path, headers, body = question[1], json.loads(question[2] or "{}"), json.loads(question[3])
    interval = INTERVAL.search(raw.partition("\n")[0])
    server = ServerConfig(stream_interval=int(interval[1]) if interval else 1)

    _, answer = _ask("POST", path, server=server, json=body, headers=headers)

    assert _events(answer) == _events(raw)


@pytest.mark.parametrize("real", [pytest.param(a, id=a["name"]) for a in ANSWERS])
def test_an_answer_is_field_for_field_that_of_the_real_server(real: dict[str, Any]) -> None:
    """Status and body of what is not a stream: pages, whole answers, and every refusal in the server's words."""
    question = real["request"]
    body = question["body"]
    server = ServerConfig(
        api_key="secret" if real["status"] == 401 else None,
        max_num_queued_reqs=0 if real["status"] == 503 else None,
    )
    if isinstance(body, dict):
        size = re.fullmatch(r"<(\d+) characters>", str(body.get("prompt")))
        body = json.dumps(body | {"prompt": "x" * int(size[1])} if size else body)
    kind = "text/plain" if body == "hello" else "application/json"

    status, answer = _ask(
        question["method"], question["path"], server=server, data=body, headers={"Content-Type": kind}
    )

    assert status == real["status"]
    assert _whole(answer) == _whole(real["body"])


def _whole(body: str) -> Any:
    return _skeleton(json.loads(body)) if body else ""


def test_text_is_held_back_until_a_character_is_whole() -> None:
    """A lead byte gives no text; what can never become a character is replaced."""
    detokenizer = Detokenizer()

    assert detokenizer.feed([0xC3], last=False) == ""
    assert detokenizer.feed([0xA9], last=False) == "\u00e9"
    assert detokenizer.feed([0xA9, 0x61], last=False) == "\ufffda"
    assert detokenizer.feed([0xC3], last=True) == "\ufffd"
