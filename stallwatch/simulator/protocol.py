"""Answers as vLLM 0.32 spells them: chunks of a stream and whole answers, with its fields, order and nulls.

Clients are tested against these, so they follow captures of the real server to the field.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stallwatch.simulator.asking import Ask, error_object
from stallwatch.simulator.request import Request


class Detokenizer:
    """Bytes to text, held back until a character is whole: some tokens therefore carry no text."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, tokens: Sequence[int], *, last: bool) -> str:
        """The text that these tokens complete."""
        raw = self._held + bytes(token for token in tokens if token < 256)
        for keep in range(len(raw), -1, -1):
            try:
                text = raw[:keep].decode()
            except UnicodeDecodeError:
                continue
            rest = raw[keep:]
            if last or len(rest) > 3 or (rest and not _may_grow(rest)):
                self._held = b""
                return raw.decode(errors="replace")
            self._held = rest
            return text
        self._held = b""
        return raw.decode(errors="replace")


def _may_grow(rest: bytes) -> bool:
    return rest[0] >= 0xC2 and all(byte & 0xC0 == 0x80 for byte in rest[1:])


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """A usage object in the server's field order."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def sse_error(message: str, *, kind: str, code: int) -> bytes:
    """An error within a stream; the server spells it with spaces, unlike all other events."""
    return b"data: " + json.dumps(error_object(message, kind=kind, param=None, code=code)).encode() + b"\n\n"


def sse(payload: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + compact(payload) + b"\n\n"


def compact(payload: Mapping[str, Any]) -> bytes:
    """JSON as the server writes it, without spaces."""
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def _logprobs(tokens: Sequence[int], first: int) -> dict[str, list[Any]]:
    """The shape of log-probabilities; the numbers mean nothing."""
    words = [chr(token) for token in tokens]
    return {
        "text_offset": list(range(first, first + len(words))),
        "token_logprobs": [-1.0] * len(words),
        "tokens": words,
        "top_logprobs": [{word: -1.0} for word in words],
    }


@dataclass(frozen=True, slots=True)
class Writer:
    """Builds the chunks and the answer of one request."""

    ask: Ask
    id: str
    created: int
    fingerprint: str

    def role_chunk(self) -> bytes:
        """The chunk that opens a chat stream; it leaves together with the first token."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunk = self._chunk([choice])
        chunk = self._with_usage(chunk, 0)
        chunk["prompt_token_ids"] = list(self.ask.prompt) if self.ask.return_token_ids else None
        chunk["prompt_text"] = None
        return sse(chunk)

    def echo_chunk(self) -> bytes:
        """A chat stream's echo of the message that it continues."""
        choice = {"index": 0, "delta": {"content": self.ask.last_message}, "logprobs": None, "finish_reason": None}
        return sse(self._with_usage(self._chunk([choice]), 0))

    def token_chunk(self, request: Request, text: str, *, first: int, upto: int, reason: str | None) -> bytes:
        """New tokens; `first` and `upto` are positions in the answer."""
        ids = list(request.output[first:upto]) if self.ask.return_token_ids else None
        choice: dict[str, Any]
        if self.ask.chat:
            choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
            if reason is not None:
                choice["stop_reason"] = None
            choice["token_ids"] = ids
        else:
            if self.ask.echo and first == 0 and not self.ask.return_token_ids:
                text = bytes(t for t in self.ask.prompt if t < 256).decode(errors="replace") + text
            shown = first == 0 and (self.ask.return_token_ids or self.ask.echo)
            choice = {
                "index": 0,
                "text": text,
                "logprobs": _logprobs(request.output[first:upto], first) if self.ask.logprobs else None,
                "finish_reason": reason,
                "stop_reason": None,
                "prompt_token_ids": list(self.ask.prompt) if shown else None,
                "token_ids": ids,
            }
        chunk = self._chunk([choice])
        if reason is not None and not self.ask.include_usage:
            chunk["system_fingerprint"] = self.fingerprint
        return sse(self._with_usage(chunk, upto))

    def usage_chunk(self, completion_tokens: int) -> bytes:
        """The last chunk before `[DONE]`, when usage was asked for."""
        chunk = self._chunk([])
        chunk["usage"] = usage(len(self.ask.prompt), completion_tokens)
        chunk["system_fingerprint"] = self.fingerprint
        return sse(chunk)

    def answer(self, request: Request, text: str, reason: str) -> bytes:
        """The whole answer of a request that did not stream."""
        ids = list(request.output) if self.ask.return_token_ids else None
        prompt_ids = list(self.ask.prompt) if self.ask.return_token_ids else None
        choice: dict[str, Any] = {"index": 0}
        tail: dict[str, Any] = {}
        if self.ask.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": None}
            message |= {"audio": None, "function_call": None, "tool_calls": [], "reasoning": None}
            choice |= {"message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            choice |= {"token_ids": ids, "routed_experts": None}
            tail = {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
        else:
            if self.ask.echo:
                text = bytes(t for t in self.ask.prompt if t < 256).decode(errors="replace") + text
            choice |= {"text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            choice |= {"token_ids": ids, "prompt_logprobs": None, "prompt_token_ids": prompt_ids}
            choice |= {"routed_experts": None}
        answer = self._chunk([choice]) | {"object": "chat.completion" if self.ask.chat else "text_completion"}
        counted = usage(len(self.ask.prompt), len(request.output))
        counted |= {"prompt_tokens_details": None, "completion_tokens_details": None}
        answer |= {"service_tier": None, "system_fingerprint": self.fingerprint, "usage": counted}
        return compact(answer | tail | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.ask.model, "choices": choices}

    def _with_usage(self, chunk: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
        if self.ask.continuous_usage:
            chunk["usage"] = usage(len(self.ask.prompt), completion_tokens)
            if self.ask.chat:
                chunk["usage"]["completion_tokens_details"] = None
        return chunk
