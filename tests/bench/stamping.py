"""A loopback server that knows when it sent what: `python -m tests.bench.stamping PORT`.

It streams completions of as many tokens as asked for, one every 8 to 12 ms, and stamps each chunk with
`time.monotonic()` (CLOCK_MONOTONIC, the same for all processes of a machine) right before it is written. `/sent` tells
the stamps of all streams. The metrics page is a real server's, filtered as vLLM filters it.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.bench.pages import REAL_PAGE
from tests.raw_server import SSE_HEAD, answer, models

SHORTEST_GAP, LONGEST_GAP = 0.008, 0.012

_PAGE = REAL_PAGE.read_bytes()
_SENT: list[dict[str, Any]] = []


async def _stream(writer: asyncio.StreamWriter, asked: dict[str, Any], request_id: str) -> None:
    sent: list[float] = []
    _SENT.append({"request_id": request_id, "sent": sent})
    rng = random.Random(len(_SENT))
    writer.write(SSE_HEAD)
    for number in range(1, int(asked["max_tokens"]) + 1):
        await asyncio.sleep(rng.uniform(SHORTEST_GAP, LONGEST_GAP))
        finish = "length" if number == asked["max_tokens"] else None
        usage = {"prompt_tokens": 8, "completion_tokens": number, "total_tokens": number + 8}
        chunk = {"choices": [{"index": 0, "text": " x", "finish_reason": finish}], "usage": usage}
        data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        sent.append(time.monotonic())
        writer.write(data)
        if writer.is_closing():
            return
    writer.write(b"data: [DONE]\n\n")


def _page(query: str) -> bytes:
    names = {value.encode() for name, value in parse_qsl(query) if name == "name[]"}
    if not names:
        return _PAGE
    lines = [line for line in _PAGE.splitlines() if line.partition(b"{")[0].partition(b" ")[0] in names]
    return b"\n".join(lines) + b"\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        url = urlsplit(head[0].split(" ")[1])
        if url.path == "/v1/completions":
            await _stream(writer, json.loads(body), headers.get("x-request-id", ""))
        elif url.path == "/v1/models":
            writer.write(models({"id": "tiny", "max_model_len": 16_384}))
        elif url.path == "/version":
            writer.write(answer("200 OK", b'{"version": "0.32.0"}'))
        elif url.path == "/sent":
            writer.write(answer("200 OK", json.dumps(_SENT).encode()))
        elif url.path.startswith("/metrics"):
            writer.write(answer("200 OK", _page(url.query), kind="text/plain; version=0.0.4"))
        else:
            writer.write(answer("404 Not Found"))
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _main(port: int) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
