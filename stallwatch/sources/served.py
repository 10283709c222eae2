"""Which model the canary asks for: the configured one, or the first base model that the server lists.

The list is read once and kept until the server refuses the model or restarts. It is bounded in bytes, and ids that no
person would write are passed over.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

from stallwatch.observations import Failure
from stallwatch.scheduling import SourceError
from stallwatch.sources.http import Target, network_failures, plain, read_bounded, refusal

log = structlog.get_logger()

_MAX_BYTES = 4 * 1024 * 1024  # a thousand adapters take about half a megabyte
_MAX_ID_LENGTH = 256
_TIMEOUT_SECONDS = 10.0
_NAMED = 5  # so many ids are told in a message


@dataclass(frozen=True, slots=True)
class Model:
    """One entry of `/v1/models`."""

    name: str
    base: bool  # not an adapter upon another model
    max_length: int | None = None  # tokens of prompt and answer together


class ServedModels:
    """The model to ask for, and what else the server has."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, *, configured: str | None) -> None:
        self._target = target
        self._session = session
        self._configured = configured
        self._listed: tuple[Model, ...] | None = None
        self._told: str | None = None

    def forget(self) -> None:
        """The server may serve something else by now."""
        self._listed = None

    async def choose(self) -> Model:
        """The model to ask for. Raises `SourceError` when none is configured and the list gives none."""
        if self._listed is None:
            try:
                self._listed = await list_models(self._target, self._session)
            except SourceError:
                if self._configured is None:
                    raise
                # A gateway need not have the list; then the configured name is taken at its word.
                self._listed = ()
        model = self._pick(self._listed)
        if model.name != self._told:
            self._told = model.name
            others = [other.name for other in self._listed if other.name != model.name]
            log.info("canary model chosen", model=model.name, others=others[:_NAMED], others_count=len(others))
        return model

    def described(self) -> str:
        """The list in a few words, for the message about a model that is not served."""
        names = [model.name for model in self._listed or ()]
        if not names:
            return ""
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return "served: " + ", ".join(plain(name, 60) for name in names[:_NAMED]) + more

    def _pick(self, listed: tuple[Model, ...]) -> Model:
        if self._configured is not None:
            known = (model for model in listed if model.name == self._configured)
            return next(known, Model(self._configured, base=True))
        base = (model for model in listed if model.base)
        chosen = next(base, listed[0] if listed else None)
        if chosen is None:
            self.forget()  # a gateway may have none before its servers are up
            raise SourceError(Failure.MALFORMED, "/v1/models lists no model: set canary.model")
        return chosen


async def list_models(target: Target, session: aiohttp.ClientSession) -> tuple[Model, ...]:
    """Reads `/v1/models`. Raises `SourceError`."""
    with network_failures():
        async with (
            asyncio.timeout(_TIMEOUT_SECONDS),
            session.get(
                target.url("/v1/models"),
                headers=target.key.headers(),
                ssl=target.tls(),
                server_hostname=target.server_name,
                allow_redirects=False,
            ) as response,
        ):
            refused = refusal(response.status, "/v1/models")
            if refused is not None:
                if response.status == 401:
                    target.key.refused()
                raise refused
            body = await read_bounded(response, _MAX_BYTES)
    if len(body) > _MAX_BYTES:
        raise SourceError(Failure.TOO_LARGE, f"/v1/models is longer than {_MAX_BYTES} bytes: set canary.model")
    return _parse(body)


def _parse(body: bytes) -> tuple[Model, ...]:
    try:
        page = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError(Failure.MALFORMED, "/v1/models is not JSON: is canary.url the API's root?") from error
    entries = page.get("data") if isinstance(page, dict) else None
    if not isinstance(entries, list):
        raise SourceError(Failure.MALFORMED, "/v1/models has no list of models")
    return tuple(model for entry in entries if (model := _model(entry)) is not None)


def _model(entry: Any) -> Model | None:
    name = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID_LENGTH or not name.isprintable():
        return None
    length = entry.get("max_model_len")
    known = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return Model(name, base=not entry.get("parent"), max_length=length if known else None)
