"""Every setting, one frozen model a room; each room receives only its own.

Names carry their units. A value that loads is a value that works: bounds and impossible combinations are refused here,
whether settings come from a person (`configuration.py`) or from code. Nothing here reads a file or the environment.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    HttpUrl,
    SecretStr,
    StringConstraints,
    UrlConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

# The multiple of the error budget at which the fast-burn alert pages. A share of missed seconds cannot exceed 1,
# so an objective whose budget times this factor reaches 1 has an alert that can never fire.
FAST_BURN_FACTOR = 14.4

PULSE_TOKENS = 64
PULSE_TOKENS_PER_MINUTE = 600
# A stream's own context slows its steps; beyond this length the canary would measure itself.
PERSISTENT_TOKENS = 2048

# Type of the errors whose message is already "what is wrong; what to do".
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Objection:
    """A combination of settings that cannot work, or that a person should hear about."""

    about: Mapping[str, object]
    """Dotted names with the values in force, defaults resolved."""
    problem: str
    remedy: str

    def __str__(self) -> str:
        names = " with ".join(f"{name} = {value}" for name, value in self.about.items())
        return f"{names}: {self.problem}; {self.remedy}"


def _refused(problem: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError(REFUSED, "{problem}; {remedy}", {"problem": problem, "remedy": remedy})


def _target_url(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.strip()
    # Before everything else, so that no message about something else repeats them.
    if "@" in re.split(r"[/?#]", text.partition("://")[2] or text, maxsplit=1)[0]:
        raise _refused("carries credentials", "take them out and give the key by an api_key_file setting")
    if not re.match(r"https?://", text, re.IGNORECASE):
        host = re.split(r"[/?#]", text.partition("://")[2] or text, maxsplit=1)[0]
        raise _refused("not an http:// or https:// address", f"write http://{host or 'HOST:PORT'}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _refused(f"not a URL ({error})", "write http://HOST:PORT, an IPv6 address in brackets") from error
    if "?" in text or "#" in text:
        raise _refused("carries a query or a fragment", "end the address with the host, the port or a path prefix")
    if port == 0:
        raise _refused("port 0 cannot be connected to", "write the port that the server listens on")
    path = parts.path.rstrip("/")
    for ending in ("/metrics", "/v1"):
        if path.endswith(ending):
            root = f"{parts.scheme}://{parts.netloc}{path.removesuffix(ending)}"
            raise _refused(f"ends in {ending}, which stallwatch adds itself", f"write {root}")
    return text


def _on_off_auto(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        word = value.strip().lower()
        return {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(word, word)
    return value


def _devices(value: object) -> object:
    if isinstance(value, list | tuple):
        value = ",".join(str(item) for item in value)
    if not isinstance(value, str):
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    names = [name.strip() for name in value.split(",")]
    if names == ["all"]:
        return "all"
    for name in names:
        if not re.fullmatch(r"\d{1,3}|(GPU|MIG)-[0-9A-Za-z/-]+", name):
            problem = f"{name or 'an empty entry'} is not a GPU" if len(names) > 1 else "not a list of GPUs"
            raise _refused(problem, "write all, or indices and UUIDs separated by commas, such as 0,1")
    if len(set(names)) < len(names):
        raise _refused("names a GPU twice", "name each GPU once")
    return ",".join(names)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    # Helm writes large integers as 2.68435456e+08.
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmg]i?)?b?", value.strip(), re.IGNORECASE)
    if match is None:
        raise _refused("not a number of bytes", "write bytes, or a number with KiB, MiB or GiB, such as 256MiB")
    number = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if number >= 1 << 63:
        raise _refused("more bytes than any disk has", "write a number with KiB, MiB or GiB, such as 256MiB")
    return int(number)


def _listen_host(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        if not re.fullmatch(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?", text) or re.fullmatch(
            r"[0-9.]+", text
        ):
            raise _refused(
                "neither an IP address nor a host name", "write an address such as 127.0.0.1 or ::, without a port"
            ) from None
    return text


def _key(value: object) -> object:
    if isinstance(value, str):
        value = value.strip()
        if not is_header_safe(value):
            raise _refused("holds characters that no HTTP header can carry", "give the key alone, in one line of ASCII")
    return value


def is_header_safe(key: str) -> bool:
    """Whether a key can travel in an HTTP header as it is."""
    return re.fullmatch(r"[!-~]+", key) is not None


TargetUrl = Annotated[HttpUrl, UrlConstraints(allowed_schemes=["http", "https"]), BeforeValidator(_target_url)]
Key = Annotated[SecretStr, BeforeValidator(_key)]
Name = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]


def _default_is(text: str) -> dict[str, Any]:
    """What the reference says of a default that depends on other settings."""
    return {"default_text": text}


def _timeout_default(seconds: float) -> Any:
    # A person who only lengthens the interval must not be told to lengthen the timeout too.
    return lambda given: max(seconds, given.get("interval_seconds", seconds))


class Room(BaseModel):
    """Base of every room's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    def objections(self) -> Iterator[Objection]:
        """Combinations of these settings that cannot work."""
        return iter(())

    @model_validator(mode="after")
    def _combinations_work(self, info: ValidationInfo) -> Self:
        found = list(self.objections())
        if info.context is not None:  # the loader reports every fault at once, so it collects them
            info.context["objections"].extend(found)
        elif found:
            raise ValueError(" | ".join(str(objection) for objection in found))
        return self


def _timeout_objections(room: str, timeout_seconds: float, interval_seconds: float) -> Iterator[Objection]:
    if timeout_seconds < interval_seconds:
        yield Objection(
            {f"{room}.timeout_seconds": timeout_seconds, f"{room}.interval_seconds": interval_seconds},
            "an answer would be given up before the next one is even due",
            f"set {room}.timeout_seconds to {interval_seconds:g} or more",
        )


def _key_objections(room: str, key: SecretStr | None, key_file: Path | None) -> Iterator[Objection]:
    if key is not None and key_file is not None:
        yield Objection(
            {f"{room}.api_key": key, f"{room}.api_key_file": key_file},
            "two keys for one server",
            f"keep {room}.api_key_file and remove {room}.api_key",
        )


class EngineSettings(Room):
    """The vLLM server that is watched."""

    url: TargetUrl = Field(
        HttpUrl("http://127.0.0.1:8000"),
        description="Where vLLM listens; a path prefix is kept and `/metrics` is joined to it.",
    )
    interval_seconds: float = Field(
        0.25, ge=0.05, le=60, description="Seconds between two looks at the counters that move with every step."
    )
    timeout_seconds: float = Field(
        default_factory=_timeout_default(2.0),
        gt=0,
        description="Seconds after which a scrape without an answer is a failure.",
        json_schema_extra=_default_is("2, or the interval where that is longer"),
    )
    full_interval_seconds: float = Field(
        30.0, ge=1, description="Seconds between two reads of the whole metrics page, which costs vLLM the most."
    )
    max_scrape_duty: float = Field(
        0.02,
        gt=0,
        le=1,
        description="Share of time that vLLM may spend on answering our scrapes; above it they become rarer.",
    )
    start_timeout_seconds: float = Field(
        1800.0, gt=0, description="Seconds after which a server that still loads its model is worth a warning."
    )
    api_key_file: Path | None = Field(
        None, description="File with the key that is sent to vLLM; read again when it changes."
    )
    api_key: Key | None = Field(
        None, description="The key itself, where no file can be mounted; never as a flag, which every `ps` shows."
    )
    ca_file: Path | None = Field(
        None, description="PEM file with the authorities that may sign vLLM's certificate, instead of the system's."
    )
    server_name: Name | None = Field(
        None, description="Name that vLLM's certificate must carry where it is not the host of the address."
    )
    insecure_skip_verify: bool = Field(
        default=False, description="Accept any certificate: the key may then go to whoever answers."
    )

    def objections(self) -> Iterator[Objection]:
        """Polls that would never finish or never be full, two keys at once."""
        yield from _timeout_objections("engine", self.timeout_seconds, self.interval_seconds)
        if self.full_interval_seconds < self.interval_seconds:
            yield Objection(
                {
                    "engine.full_interval_seconds": self.full_interval_seconds,
                    "engine.interval_seconds": self.interval_seconds,
                },
                "the whole page would be due more often than the counters are read",
                f"set engine.full_interval_seconds to {self.interval_seconds:g} or more",
            )
        yield from _key_objections("engine", self.api_key, self.api_key_file)


class CanarySettings(Room):
    """The synthetic reader: small streamed requests of our own."""

    enabled: bool = Field(
        default=True, description="Send canary requests; without them only the engine's own counters are judged."
    )
    url: TargetUrl | None = Field(
        None,
        description="Where the canary asks; the gateway's address here judges the path apart from the engine.",
        json_schema_extra=_default_is("`engine.url`"),
    )
    mode: Literal["pulse", "persistent"] = Field(
        "pulse",
        description="`pulse` sends a short request now and then; `persistent` keeps one stream open, sees every step "
        "and costs one place in the batch.",
    )
    api: Literal["completions", "chat"] = Field(
        "completions", description="Endpoint: `/v1/completions`, or `/v1/chat/completions` for servers without it."
    )
    model: Name | None = Field(
        None,
        description="Model name to ask for.",
        json_schema_extra=_default_is("the first base model of `/v1/models`"),
    )
    interval_seconds: float = Field(
        15.0, ge=1, description="Seconds between two pulses, on average; no use in persistent mode."
    )
    tokens: int | None = Field(
        None,
        ge=2,
        le=PERSISTENT_TOKENS,
        description="Tokens that one request asks for.",
        json_schema_extra=_default_is(f"{PULSE_TOKENS}, in persistent mode {PERSISTENT_TOKENS}"),
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens a minute that canaries may cost; beyond it pulses are skipped and counted.",
        json_schema_extra=_default_is(f"{PULSE_TOKENS_PER_MINUTE}, in persistent mode no bound"),
    )
    timeout_seconds: float = Field(
        120.0,
        gt=0,
        description="Seconds without a new token after which a canary gives up; ten times that bounds a whole request.",
    )
    skip_when_waiting: int = Field(
        32, ge=1, description="Waiting requests from which on no pulse is sent: busy is not down."
    )
    only_when_busy: bool = Field(
        default=False, description="Send pulses only while other requests run, so that scale-to-zero can reach zero."
    )
    pause_file: Path | None = Field(
        None, description="File whose presence stops canaries without a restart; it may appear and vanish at any time."
    )
    api_key_file: Path | None = Field(
        None,
        description="File with the key that the canary sends; read again when it changes.",
        json_schema_extra=_default_is("`engine.api_key_file` while both ask the same server"),
    )
    api_key: Key | None = Field(
        None, description="The key itself, where no file can be mounted; never as a flag, which every `ps` shows."
    )
    ca_file: Path | None = Field(
        None,
        description="PEM file with the authorities that may sign the certificate, instead of the system's.",
        json_schema_extra=_default_is("`engine.ca_file` while both ask the same server"),
    )
    server_name: Name | None = Field(
        None,
        description="Name that the certificate must carry where it is not the host of the address.",
        json_schema_extra=_default_is("`engine.server_name` while both ask the same server"),
    )
    insecure_skip_verify: bool = Field(
        default=False,
        description="Accept any certificate: the key may then go to whoever answers.",
        json_schema_extra=_default_is("`engine.insecure_skip_verify` while both ask the same server"),
    )

    @property
    def stream_tokens(self) -> int:
        """Tokens that one request asks for, with the mode's default."""
        if self.tokens is not None:
            return self.tokens
        if self.mode == "pulse":
            return PULSE_TOKENS
        # A budget set without a length bounds the length as well.
        return max(2, min(PERSISTENT_TOKENS, self.tokens_per_minute or PERSISTENT_TOKENS))

    @property
    def token_budget(self) -> int | None:
        """Tokens a minute that canaries may cost, with the mode's default; None is no bound."""
        if self.tokens_per_minute is None and self.mode == "pulse":
            return PULSE_TOKENS_PER_MINUTE
        return self.tokens_per_minute

    def objections(self) -> Iterator[Objection]:
        """Budgets that one request exceeds, modes that exclude each other, two keys at once."""
        yield from _key_objections("canary", self.api_key, self.api_key_file)
        if not self.enabled:
            return
        if self.token_budget is not None and self.stream_tokens > self.token_budget:
            yield Objection(
                {"canary.tokens": self.stream_tokens, "canary.tokens_per_minute": self.token_budget},
                "one request costs more than the budget of a minute, so none would ever be sent",
                f"set canary.tokens to at most {self.token_budget} or canary.tokens_per_minute to at least "
                f"{self.stream_tokens}",
            )
        if self.mode == "persistent" and self.only_when_busy:
            yield Objection(
                {"canary.mode": self.mode, "canary.only_when_busy": "true"},
                "a stream that is always open keeps the server busy itself",
                "set canary.mode to pulse, or canary.only_when_busy to false",
            )


class GpuSettings(Room):
    """GPU counters through NVML."""

    enabled: Annotated[Literal["auto", "true", "false"], BeforeValidator(_on_off_auto)] = Field(
        "auto", description="Read GPU counters; `auto` does where a driver is found, `true` reports its absence."
    )
    interval_seconds: float = Field(0.2, ge=0.05, le=60, description="Seconds between two reads of the GPU counters.")
    timeout_seconds: float = Field(
        default_factory=_timeout_default(5.0),
        gt=0,
        description="Seconds after which a driver without an answer is a failure.",
        json_schema_extra=_default_is("5, or the interval where that is longer"),
    )
    devices: Annotated[str, BeforeValidator(_devices)] = Field(
        "all", description="GPUs to read: `all`, or indices and UUIDs separated by commas."
    )
    gpm: bool = Field(
        default=True,
        description="Read the profiling counters of Hopper and later GPUs; other profilers on the same GPU share them.",
    )

    @property
    def device_names(self) -> tuple[str, ...] | None:
        """Indices and UUIDs to read; None is all of them."""
        return None if self.devices == "all" else tuple(self.devices.split(","))

    def objections(self) -> Iterator[Objection]:
        """Reads that would be given up before the next is due."""
        yield from _timeout_objections("gpu", self.timeout_seconds, self.interval_seconds)


class HostSettings(Room):
    """Pressure, throttling and network counters of the host."""

    enabled: bool = Field(default=True, description="Read the host's pressure, throttling and RDMA counters.")
    interval_seconds: float = Field(1.0, ge=0.1, le=60, description="Seconds between two reads of the host counters.")
    proc_path: Path = Field(Path("/proc"), description="Where procfs is mounted.")
    sys_path: Path = Field(Path("/sys"), description="Where sysfs is mounted.")
    engine_cgroup: Path | None = Field(
        None, description="Directory of the cgroup of vLLM's container, where it can be read, to see it throttled."
    )


class SloSettings(Room):
    """What readers were promised."""

    itl_seconds: float = Field(
        0.1, gt=0, le=600, description="Longest acceptable seconds per token while an answer is being written."
    )
    ttft_seconds: float = Field(5.0, gt=0, le=600, description="Longest acceptable seconds until the first token.")
    target: float = Field(
        0.99,
        gt=0,
        lt=1,
        description="Share of seconds that must be good, 0.9306 or more; what is left is the error budget.",
    )

    def objections(self) -> Iterator[Objection]:
        """A budget so large that its alert can never fire."""
        worst = FAST_BURN_FACTOR * (1 - self.target)
        if worst >= 1:
            yield Objection(
                {"slo.target": self.target},
                f"the fast-burn alert fires at {FAST_BURN_FACTOR:g} times the error budget, which is {worst:.0%} of "
                "all seconds and can never happen",
                f"set it to {1 - 1 / FAST_BURN_FACTOR + 5e-5:.4f} or more",
            )


class StallSettings(Room):
    """When a gap is a stall."""

    floor_seconds: float = Field(
        0.5, gt=0, le=600, description="No gap shorter than this many seconds opens a stall, however fast the engine."
    )
    factor: float = Field(8.0, gt=1, description="Multiples of the usual gap above which a gap opens a stall.")
    ttft_seconds: float = Field(
        10.0, gt=0, le=600, description="Seconds without a first token after which readers are stalled at admission."
    )
    hang_seconds: float = Field(
        30.0, gt=0, description="Seconds without an engine step, requests running, after which it is called a hang."
    )

    def objections(self) -> Iterator[Objection]:
        """A hang that would be shorter than a stall."""
        if self.hang_seconds <= self.floor_seconds:
            yield Objection(
                {"stall.hang_seconds": self.hang_seconds, "stall.floor_seconds": self.floor_seconds},
                "every stall would be called a hang",
                f"set stall.hang_seconds above {self.floor_seconds:g}",
            )


class RecorderSettings(Room):
    """The flight recorder."""

    minutes: float = Field(15.0, gt=0, le=120, description="Minutes of observations that are kept in memory.")
    directory: Path | None = Field(
        None,
        description="Directory for incident bundles; it is made when missing.",
        json_schema_extra=_default_is("none are written"),
    )
    max_bytes: Annotated[int, BeforeValidator(_bytes)] = Field(
        256 * 1024 * 1024,
        ge=1024 * 1024,
        description="Bytes that incident bundles may take together, where the oldest go first; and as many that the "
        "file of `recorder.file` may take, which then ends.",
        json_schema_extra=_default_is("256MiB"),
    )
    file: Path | None = Field(
        None,
        description="File that everything observed is appended to, to be judged again by `stallwatch replay`; "
        "compressed if its name ends in `.gz`. `stallwatch run --record FILE` is the same.",
        json_schema_extra=_default_is("none is written"),
    )


class WebSettings(Room):
    """Our own listener: metrics, probes and the live page."""

    host: Annotated[str, BeforeValidator(_listen_host)] = Field(
        "::", description="Address to listen on; `::` takes IPv6 and IPv4, and falls back to IPv4 alone."
    )
    port: int = Field(9709, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    tls_cert_file: Path | None = Field(
        None,
        description="PEM file with our certificate and those between it and its authority; read again when it changes.",
        json_schema_extra=_default_is("plain HTTP"),
    )
    tls_key_file: Path | None = Field(
        None, description="PEM file with the certificate's private key, not encrypted; read again when it changes."
    )
    client_ca_file: Path | None = Field(
        None,
        description="PEM file with the authorities whose clients alone may connect; read again when it changes.",
        json_schema_extra=_default_is("clients need no certificate"),
    )
    bearer_token_file: Path | None = Field(
        None,
        description="File with the tokens that open everything but the probes, one a line; read again when it changes.",
    )
    basic_auth_file: Path | None = Field(
        None,
        description="File with users and hashed passwords, one `user:hash` a line as `stallwatch hash-password` "
        "writes them, that open everything but the probes; read again when it changes.",
    )

    def objections(self) -> Iterator[Objection]:
        """Half of what TLS needs."""
        for name, needed in (
            ("tls_cert_file", "tls_key_file"),
            ("tls_key_file", "tls_cert_file"),
            ("client_ca_file", "tls_cert_file"),
        ):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                yield Objection(
                    {f"web.{name}": getattr(self, name)},
                    f"has no effect without web.{needed}",
                    f"set web.{needed}, or remove web.{name}",
                )


class LogSettings(Room):
    """Our own log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least serious kind of event that is logged."
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto",
        description="`json` writes one object a line, `console` is for eyes; `auto` asks whether a person looks.",
    )


@dataclass(frozen=True, slots=True)
class Access:
    """How one server is reached: address, key and certificates, with every default resolved."""

    url: str
    api_key_file: Path | None
    api_key: SecretStr | None
    ca_file: Path | None
    server_name: str | None
    insecure_skip_verify: bool


class Settings(Room):
    """All rooms."""

    engine: EngineSettings = EngineSettings()
    canary: CanarySettings = CanarySettings()
    gpu: GpuSettings = GpuSettings()
    host: HostSettings = HostSettings()
    slo: SloSettings = SloSettings()
    stall: StallSettings = StallSettings()
    recorder: RecorderSettings = RecorderSettings()
    web: WebSettings = WebSettings()
    log: LogSettings = LogSettings()

    @property
    def engine_access(self) -> Access:
        """How the engine is reached."""
        engine = self.engine
        return Access(
            str(engine.url),
            engine.api_key_file,
            engine.api_key,
            engine.ca_file,
            engine.server_name,
            engine.insecure_skip_verify,
        )

    @property
    def canary_access(self) -> Access:
        """How the canary's server is reached.

        While that is the engine's own host and port, the canary uses the engine's key and certificates for what it
        was not given itself; to any other server the engine's key never goes.
        """
        canary, engine = self.canary, self.engine_access
        url = canary.url or self.engine.url
        inherits = _origin(url) == _origin(self.engine.url)
        own_key = canary.api_key_file is not None or canary.api_key is not None
        borrow_key = inherits and not own_key
        return Access(
            str(url),
            engine.api_key_file if borrow_key else canary.api_key_file,
            engine.api_key if borrow_key else canary.api_key,
            canary.ca_file or (engine.ca_file if inherits else None),
            canary.server_name or (engine.server_name if inherits else None),
            engine.insecure_skip_verify
            if inherits and "insecure_skip_verify" not in canary.model_fields_set
            else canary.insecure_skip_verify,
        )

    def objections(self) -> Iterator[Objection]:
        """Rooms that contradict each other."""
        if self.canary.enabled:
            for name, seconds, seen in (
                ("stall.ttft_seconds", self.stall.ttft_seconds, "a stall at admission"),
                ("slo.ttft_seconds", self.slo.ttft_seconds, "a missed first-token objective"),
                ("stall.floor_seconds", self.stall.floor_seconds, "a stall"),
                ("slo.itl_seconds", self.slo.itl_seconds, "a missed gap objective"),
            ):
                if self.canary.timeout_seconds <= seconds:
                    yield Objection(
                        {"canary.timeout_seconds": self.canary.timeout_seconds, name: seconds},
                        f"the canary would give up before {seen} can be seen",
                        f"set canary.timeout_seconds above {seconds:g}",
                    )
        for name, url in (("engine.url", self.engine.url), ("canary.url", self.canary.url)):
            if url is not None and url.port == self.web.port and _same_host(self.web.host, url.host or ""):
                yield Objection(
                    {"web.port": self.web.port, name: url},
                    "stallwatch would listen where it looks for the server",
                    f"choose another web.port, or correct {name}",
                )

    def cautions(self) -> Iterator[Objection]:
        """What works but is probably not meant; worth one line in the log at start."""
        canary, slo, stall = self.canary, self.slo, self.stall
        if canary.enabled and canary.mode == "pulse" and canary.token_budget is not None:
            planned = 60 / canary.interval_seconds * canary.stream_tokens
            if planned > canary.token_budget >= canary.stream_tokens:
                yield Objection(
                    {
                        "canary.tokens_per_minute": canary.token_budget,
                        "canary.interval_seconds": canary.interval_seconds,
                    },
                    f"the pulses would cost {planned:.0f} tokens a minute, so some will be skipped",
                    f"set canary.interval_seconds to {60 * canary.stream_tokens / canary.token_budget:.3g} or more",
                )
        if canary.enabled and canary.mode == "persistent" and canary.token_budget is not None:
            yield Objection(
                {"canary.tokens_per_minute": canary.token_budget, "canary.mode": canary.mode},
                "the stream stays closed whenever the budget of a minute is spent, and sees no gap meanwhile",
                "leave canary.tokens_per_minute unset in persistent mode",
            )
        if stall.floor_seconds < slo.itl_seconds:
            yield Objection(
                {"stall.floor_seconds": stall.floor_seconds, "slo.itl_seconds": slo.itl_seconds},
                "a gap that keeps the promise can open a stall",
                f"set stall.floor_seconds to {slo.itl_seconds:g} or more",
            )
        if stall.ttft_seconds < slo.ttft_seconds:
            yield Objection(
                {"stall.ttft_seconds": stall.ttft_seconds, "slo.ttft_seconds": slo.ttft_seconds},
                "a first token that keeps the promise can come out of a stall",
                f"set stall.ttft_seconds to {slo.ttft_seconds:g} or more",
            )
        for name in ("bearer_token_file", "basic_auth_file"):
            path = getattr(self.web, name)
            if path is not None and self.web.tls_cert_file is None and not _is_loopback(self.web.host):
                yield Objection(
                    {f"web.{name}": path},
                    "clients send what opens our pages in clear text",
                    "set web.tls_cert_file and web.tls_key_file unless this network is trusted",
                )
        yield from _access_cautions("engine", self.engine, self.engine.url)
        yield from _access_cautions("canary", self.canary, self.canary.url or self.engine.url)


def _access_cautions(room: str, access: EngineSettings | CanarySettings, url: HttpUrl) -> Iterator[Objection]:
    if access.api_key is not None:
        yield Objection(
            {f"{room}.api_key": access.api_key},
            "whoever may read this process's environment or that file can read the key, and it is never read again",
            f"mount it as a file and set {room}.api_key_file",
        )
    has_key = access.api_key is not None or access.api_key_file is not None
    if url.scheme == "http":
        for name in ("ca_file", "server_name", "insecure_skip_verify"):
            value = getattr(access, name)
            if value:
                yield Objection(
                    {f"{room}.{name}": value, f"{room}.url": url},
                    "has no effect without https",
                    f"write https:// in {room}.url or remove {room}.{name}",
                )
        if has_key and not _is_loopback(url.host or ""):
            yield Objection(
                {f"{room}.url": url},
                "the key travels in clear text",
                "use https unless this network is trusted",
            )
    elif access.insecure_skip_verify:
        yield Objection(
            {f"{room}.insecure_skip_verify": "true"},
            "whoever answers at that address is believed" + (" and receives the key" if has_key else ""),
            f"set {room}.ca_file and {room}.server_name instead",
        )


def _origin(url: HttpUrl) -> tuple[str, str | None, int | None]:
    return url.scheme, url.host, url.port


def _is_loopback(host: str) -> bool:
    name = host.strip("[]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _same_host(listening: str, target: str) -> bool:
    """Whether a listener there takes the target's connections, as far as names alone can tell."""
    target = target.strip("[]").lower()
    if listening in {"::", "0.0.0.0"}:  # noqa: S104 (compared, not bound)
        return _is_loopback(target)
    return target == listening.lower() or (
        "localhost" in {target, listening} and _is_loopback(target) and _is_loopback(listening)
    )
