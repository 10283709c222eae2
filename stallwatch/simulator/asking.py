"""Requests for text, checked as vLLM 0.32 checks them: the same limits, and the same words when it refuses.

The tokenizer is one token a byte, so a prompt's length is known to whoever sends it.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SALT_FORBIDDEN = frozenset("@/\\\0")
_DEFAULT_MAX_TOKENS = 16


class BadRequest(Exception):  # noqa: N818  # named after the error type on the wire
    """A request that the server refuses, as the error object it answers with."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_object(message, kind=kind, param=param, code=status)


def error_object(message: str, *, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """The error object, before a stream as a body and within a stream as a chunk."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _invalid(message: str, param: str, value: object = None) -> BadRequest:
    """A value that vLLM itself finds wrong."""
    told = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return BadRequest(f"{message} ({told})", param=param)


def _malformed(problem: str, place: str | None) -> BadRequest:
    """A body that does not even have the right form."""
    return BadRequest(f"1 validation error:\n  {problem}", kind="Bad Request", param=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checked request for text."""

    chat: bool
    model: str
    prompt: "array[int]"
    last_message: str
    max_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    logprobs: bool
    echo: bool
    stream_interval: int
    priority: int
    salt: bytes


def read_body(raw: bytes, content_type: str) -> Mapping[str, Any]:
    """The JSON object of a request."""
    if content_type != "application/json":
        raise _malformed("Unsupported Media Type: Only 'application/json' is allowed", None)
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        place = f"body.{error.pos}"
        problem = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": "<dict of 0 items>"}
        raise _malformed(str(problem | {"ctx": {"error": error.msg}}), place) from None
    if not isinstance(body, Mapping):
        problem = {"type": "model_attributes_type", "loc": "body", "msg": "Input should be a valid dictionary"}
        raise _malformed(str(problem), "body")
    return body


def parse(body: Mapping[str, Any], *, chat: bool, models: Sequence[str], max_model_len: int) -> Ask:
    """Checks a body as the server does; raises `BadRequest`."""
    model = body.get("model") or models[0]
    options = body.get("stream_options") or {}
    stream = bool(body.get("stream"))
    if options and not stream:
        raise _invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    salt = _salt(body.get("cache_salt"))
    prompt, last_message = _chat_prompt(body) if chat else (_prompt(body.get("prompt")), "")
    if model not in models:
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(models)}."
        raise BadRequest(message, status=404, kind="NotFoundError", param="model")
    if _integer(body, "n", 1) != 1:
        raise _invalid("Only one answer to a prompt is simulated", "n")
    include = bool(options.get("include_usage"))
    return Ask(
        chat=chat,
        model=model,
        prompt=prompt,
        last_message=last_message,
        max_tokens=_limit(body, len(prompt), chat=chat, max_model_len=max_model_len),
        ignore_eos=bool(body.get("ignore_eos")),
        stream=stream,
        include_usage=include,
        continuous_usage=include and bool(options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
        logprobs=not chat and body.get("logprobs") is not None,
        echo=bool(body.get("echo")),
        stream_interval=_integer(body, "stream_interval", 1),
        priority=_integer(body, "priority", 0),
        salt=salt,
    )


def _integer(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        place = f"body.{name}"
        message = "Input should be a valid integer, unable to parse string as an integer"
        problem = {"type": "int_parsing", "loc": place, "msg": message, "input": value}
        raise _malformed(str(problem), place) from None


def _salt(salt: object) -> bytes:
    if salt is None:
        return b""
    if not isinstance(salt, str) or not salt:
        raise _invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > 128 or set(salt) & _SALT_FORBIDDEN:
        raise _invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )
    return salt.encode()


def _limit(body: Mapping[str, Any], prompt_tokens: int, *, chat: bool, max_model_len: int) -> int:
    """How many tokens the answer may have: what was asked for, as far as the model's length allows."""
    room = max_model_len - prompt_tokens
    if room <= 0:
        # The tokenizer stops one token past the limit, so that is all the server knows of a longer prompt.
        seen = min(prompt_tokens, max_model_len + 1)
        qualifier = "at least " if seen > max_model_len else ""
        raise _invalid(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{qualifier}{seen} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            seen,
        )
    name = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    wanted = _integer(body, name, room if chat else _DEFAULT_MAX_TOKENS)
    if wanted < 1:
        raise _invalid(f"max_tokens must be at least 1, got {wanted}.", "max_tokens", wanted)
    limit = min(wanted, room)
    least = _integer(body, "min_tokens", 0)
    if least > limit:
        raise BadRequest(f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.")
    return limit


def _tokens(text: str) -> "array[int]":
    return array("H", list(text.encode()))


def _prompt(prompt: Any) -> "array[int]":
    match prompt:
        case str() if prompt:
            return _tokens(prompt)
        case [str(only)]:
            return _tokens(only)
        case [*ids] if ids and all(isinstance(i, int) and 0 <= i < 65536 for i in ids):
            return array("H", ids)
        case None | "" | []:
            raise _invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        case _:
            raise _invalid("Only one prompt, as text or as token ids, is simulated", "prompt")


def _chat_prompt(body: Mapping[str, Any]) -> tuple["array[int]", str]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _malformed(str({"type": "missing", "loc": "body.messages", "msg": "Field required"}), "body.messages")
    lines = [f"<{m.get('role', 'user')}>{_content(m.get('content'))}\n" for m in messages]
    last = _content(messages[-1].get("content")) if messages[-1].get("role") == "assistant" else ""
    return _tokens("".join(lines) + "<assistant>"), last


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")
