"""What the chunks of a streamed answer say: how many tokens are new, that the answer is finished, that it failed.

Pure. A chunk is not a token: one may carry several, and a role chunk, an empty delta or a usage-only chunk carries
none. The server's own cumulative count decides where it gives one and it makes sense; else token ids; else each chunk
with text is one token. Nothing a server sends may crash us or take a token back.
"""

import json
from collections.abc import Callable
from typing import Any

from stallwatch.observations import Failure
from stallwatch.scheduling import SourceError
from stallwatch.sources.http import plain

_SAID_IN_CHAT = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")


class TokenCounter:
    """Counts the new tokens of one stream, chunk by chunk."""

    def __init__(self, max_tokens: int, *, clean: Callable[[str], str] = plain) -> None:
        self._clean = clean  # what makes a server's words fit for a message
        # Twice what was asked is no rounding; it is a server that ignores the bound that protects it and us.
        self._limit = 2 * max_tokens + 16
        self._believed = True  # the server's cumulative count
        self._moves = False  # some servers send a count in each chunk and fill it in at the end only
        self._reported = 0
        self.tokens = 0
        self.finished = False  # a finish reason was seen
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None

    def read(self, data: str) -> int:
        """New tokens in one event. Raises `SourceError` for an error object, for nonsense, and for too many tokens."""
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SourceError(Failure.MALFORMED, "an event of the stream is not JSON") from error
        if not isinstance(chunk, dict):
            raise SourceError(Failure.MALFORMED, "an event of the stream is not a JSON object")
        if chunk.get("error") or chunk.get("object") == "error":
            said = self._clean(error_message(chunk)) or "no message"
            raise SourceError(Failure.SERVER_ERROR, f"error inside the stream: {said}")
        count = self._usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            return 0
        new = self._new_tokens(count, [choice for choice in choices if isinstance(choice, dict)])
        self.tokens += new
        if self.tokens > self._limit:
            raise SourceError(Failure.MALFORMED, f"more than {self._limit} tokens: the server ignores max_tokens")
        return new

    def _new_tokens(self, count: int | None, choices: list[dict[str, Any]]) -> int:
        ids = 0
        said = False
        silent = False  # a chunk of text that is empty, as for half a character: the count tells if a token is in it
        for choice in choices:
            self.finished = self.finished or bool(choice.get("finish_reason"))
            token_ids = choice.get("token_ids")
            ids += len(token_ids) if isinstance(token_ids, list) else 0
            delta = choice.get("delta")
            if isinstance(delta, dict):
                said = said or any(delta.get(field) for field in _SAID_IN_CHAT)
                silent = silent or "role" not in delta
            else:
                said = said or bool(choice.get("text"))
                silent = silent or choice.get("text") == ""
        if not said and not silent and not ids:
            return 0
        if count is None or not self._believed:
            return ids or int(said)
        moved = count - self.tokens
        if moved > 0:
            self._moves = True
            return moved
        return 0 if self._moves else ids or int(said)

    def _usage(self, usage: Any) -> int | None:
        """The cumulative count of tokens, where it can be one."""
        if not isinstance(usage, dict):
            return None
        prompt = _count(usage.get("prompt_tokens"))
        if prompt is not None:
            self.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and (cached := _count(details.get("cached_tokens"))) is not None:
            self.cached_tokens = cached
        count = _count(usage.get("completion_tokens"))
        if count is None:
            return None
        if count < self._reported or count > self._limit:
            self._believed = False
            return None
        self._reported = count
        return count


def _count(value: Any) -> int | None:
    plausible = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if plausible else None


def error_message(body: Any) -> str:
    """The sentence for people in an error answer of vLLM, FastAPI or a gateway, as it came; "" if there is none."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error")
    detail = body.get("detail")
    first = detail[0] if isinstance(detail, list) and detail else None
    for candidate in (
        error.get("message") if isinstance(error, dict) else error,
        body.get("message"),
        first.get("msg") if isinstance(first, dict) else detail,
    ):
        if isinstance(candidate, str) and candidate.strip():
            return candidate
    return ""
