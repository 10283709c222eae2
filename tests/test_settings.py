import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from stallwatch import configuration
from stallwatch.configuration import BadConfiguration, Configuration, load
from stallwatch.settings import FAST_BURN_FACTOR, CanarySettings, Settings
from tests.certificates import issue

# The key was thrown away with its passphrase.
AN_ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAiSl4TpuW30UwICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEOsbHbmN4a1jj4JeZ2ftisYEgZAu
ocTlZWJYC7Qg0IAbDBQmgzDPcbkcGC4uUFCREuEU2ZU65eLZJv9qlUfyEsg/crJS
UDXjvy94SIapP5RfiOf3DQjOe/uJuZKa1OL8Wu5QnbaoCxy0TvYgGfZLoZar+o+7
ChAz9vr+lA2fUQ/IiPXaohEs9jxalwi0wz4qS7/EgqztRxv1RmwqJ/PcCIiqVdo=
-----END ENCRYPTED PRIVATE KEY-----
"""

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

SERVICE_LINKS = {
    "STALLWATCH_PORT": "tcp://10.0.0.1:9709",
    "STALLWATCH_SERVICE_HOST": "10.0.0.1",
    "STALLWATCH_SERVICE_PORT": "9709",
    "STALLWATCH_SERVICE_PORT_METRICS": "9709",
    "STALLWATCH_SERVICE_PORT_HTTP_2": "9709",
    **{
        f"STALLWATCH_PORT_9709_{protocol}{suffix}": value
        for protocol in ("TCP", "UDP", "SCTP")
        for suffix, value in {
            "": f"{protocol.lower()}://10.0.0.1:9709",
            "_PROTO": protocol.lower(),
            "_PORT": "9709",
            "_ADDR": "10.0.0.1",
        }.items()
    },
    # Services called stallwatch-web and stallwatch-canary: one letter away from settings of ours.
    "STALLWATCH_WEB_PORT": "tcp://10.0.0.1:9709",
    "STALLWATCH_WEB_SERVICE_HOST": "10.0.0.1",
    "STALLWATCH_CANARY_SERVICE_PORT_HTTP": "80",
    "STALLWATCH_CANARY_PORT_80_TCP_ADDR": "10.0.0.1",
}


@dataclass(frozen=True)
class Bad:
    """One configuration that must be refused, and every line that it must be refused with."""

    name: str
    lines: tuple[str, ...]
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    file: str | None = None
    suffix: str = ".yaml"
    setup: Callable[[Path], object] | None = None


def bad(name: str, *lines: str, **given: Any) -> Bad:
    return Bad(name, lines, **given)


def env_bad(variable: str, value: str, message: str) -> Bad:
    return Bad(f"{variable}={value}"[:70], (message,), env={variable: value})


TABLE = [
    # names
    env_bad(
        "STALLWATCH_LOG_LEVLE", "debug", "STALLWATCH_LOG_LEVLE: not a setting; did you mean STALLWATCH_LOG__LEVEL?"
    ),
    env_bad(
        "STALLWATCH_CANARY_MODE",
        "pulse",
        "STALLWATCH_CANARY_MODE: not a setting; did you mean STALLWATCH_CANARY__MODE?",
    ),
    env_bad(
        "STALLWATCH_CANARY__MODUS",
        "pulse",
        "STALLWATCH_CANARY__MODUS: not a setting; did you mean STALLWATCH_CANARY__MODE?",
    ),
    env_bad(
        "STALLWATCH_API_KEY", "sk-1", "STALLWATCH_API_KEY: not a setting; did you mean STALLWATCH_ENGINE__API_KEY?"
    ),
    env_bad("STALLWATCH_URL", "http://h:1", "STALLWATCH_URL: not a setting; did you mean STALLWATCH_ENGINE__URL?"),
    env_bad("STALLWATCH_CONFIGG", "x", "STALLWATCH_CONFIGG: not a setting; did you mean STALLWATCH_CONFIG?"),
    env_bad(
        "stallwatch_canary__mode",
        "pulse",
        "stallwatch_canary__mode: not a setting; did you mean STALLWATCH_CANARY__MODE?",
    ),
    env_bad(
        "STALLWATCH_CANARY",
        '{"mode": "pulse"}',
        "STALLWATCH_CANARY: names a group of settings; set one of them, such as STALLWATCH_CANARY__ENABLED",
    ),
    env_bad(
        "STALLWATCH_QQQ",
        "1",
        "STALLWATCH_QQQ: not a setting; remove it (`stallwatch run --help` lists the settings)",
    ),
    bad("flag name", "--web.prt: not a setting; did you mean --web.port?", flags=("--web.prt", "80")),
    bad(
        "flag in kebab case",
        "--canary.tokens-per-minute: not a setting; did you mean --canary.tokens_per_minute?",
        flags=("--canary.tokens-per-minute=100",),
    ),
    bad("config misspelt", "--confg: not a setting; did you mean --config?", flags=("--confg", "x.yaml")),
    bad("flag without room", "--port: not a setting; did you mean --web.port?", flags=("--port", "80")),
    bad("flag of another room", "--canary.port: not a setting; did you mean --web.port?", flags=("--canary.port=80",)),
    bad(
        "unknown name in a known room",
        "--canary.budget: not a setting; remove it (`stallwatch run --help` lists the settings)",
        flags=("--canary.budget=80",),
    ),
    # flags
    bad(
        "flag without value", "--web.port: has no value; write --web.port VALUE, or leave it out", flags=("--web.port",)
    ),
    bad(
        "empty flag",
        "--engine.url: has no value; write --engine.url VALUE, or leave it out",
        flags=("--engine.url=",),
    ),
    bad(
        "flag before flag",
        "--web.port: has no value; write --web.port VALUE, or leave it out",
        flags=("--web.port", "--canary.enabled", "false"),
    ),
    bad("config without file", "--config: has no value; write --config FILE, or leave it out", flags=("--config",)),
    bad(
        "argument",
        "http://h:1: an argument that this command does not take; write --SETTING VALUE",
        flags=("http://h:1",),
    ),
    bad(
        "key as a flag",
        "--engine.api_key: a secret on the command line shows in every `ps`; "
        "set STALLWATCH_ENGINE__API_KEY, or better engine.api_key_file",
        flags=("--engine.api_key", "sk-verysecret"),
    ),
    # values
    bad(
        "choice",
        "--canary.mode = presistent: not one of pulse, persistent; did you mean persistent?",
        flags=("--canary.mode", "presistent"),
    ),
    env_bad(
        "STALLWATCH_LOG__LEVEL",
        "verbose",
        "STALLWATCH_LOG__LEVEL = verbose: not one of debug, info, warning, error; "
        "choose one of debug, info, warning, error",
    ),
    env_bad(
        "STALLWATCH_CANARY__ENABLED",
        "maybe",
        "STALLWATCH_CANARY__ENABLED = maybe: neither true nor false; write true or false",
    ),
    env_bad(
        "STALLWATCH_WEB__PORT",
        "80.5",
        "STALLWATCH_WEB__PORT = 80.5: not a whole number; write a whole number from 0 to 65535",
    ),
    env_bad("STALLWATCH_WEB__PORT", "99999", "STALLWATCH_WEB__PORT = 99999: too large; set it from 0 to 65535"),
    env_bad(
        "STALLWATCH_CANARY__INTERVAL_SECONDS",
        "500ms",
        "STALLWATCH_CANARY__INTERVAL_SECONDS = 500ms: not a number; the unit is in the name: write 0.5",
    ),
    env_bad(
        "STALLWATCH_ENGINE__INTERVAL_SECONDS",
        "0",
        "STALLWATCH_ENGINE__INTERVAL_SECONDS = 0: too small; set it from 0.05 to 60",
    ),
    env_bad(
        "STALLWATCH_SLO__ITL_SECONDS", "0", "STALLWATCH_SLO__ITL_SECONDS = 0: too small; set it above 0 and up to 600"
    ),
    env_bad(
        "STALLWATCH_SLO__TTFT_SECONDS",
        "nan",
        "STALLWATCH_SLO__TTFT_SECONDS = nan: not a finite number; set it above 0 and up to 600",
    ),
    env_bad("STALLWATCH_STALL__FACTOR", "inf", "STALLWATCH_STALL__FACTOR = inf: not a finite number; set it above 1"),
    env_bad("STALLWATCH_CANARY__TOKENS", "1", "STALLWATCH_CANARY__TOKENS = 1: too small; set it from 2 to 2048"),
    env_bad("STALLWATCH_SLO__TARGET", "99", "STALLWATCH_SLO__TARGET = 99: too large; it is a share: write 0.99"),
    env_bad(
        "STALLWATCH_SLO__TARGET", "1", "STALLWATCH_SLO__TARGET = 1: too large; set it between 0 and 1, both excluded"
    ),
    env_bad(
        "STALLWATCH_RECORDER__MAX_BYTES",
        "lots",
        "STALLWATCH_RECORDER__MAX_BYTES = lots: not a number of bytes; "
        "write bytes, or a number with KiB, MiB or GiB, such as 256MiB",
    ),
    env_bad(
        "STALLWATCH_RECORDER__MAX_BYTES",
        "1e400",
        "STALLWATCH_RECORDER__MAX_BYTES = 1e400: more bytes than any disk has; "
        "write a number with KiB, MiB or GiB, such as 256MiB",
    ),
    env_bad(
        "STALLWATCH_WEB__HOST",
        "0.0.0.0:9709",
        "STALLWATCH_WEB__HOST = 0.0.0.0:9709: neither an IP address nor a host name; "
        "write an address such as 127.0.0.1 or ::, without a port",
    ),
    env_bad(
        "STALLWATCH_GPU__DEVICES",
        "0;1",
        "STALLWATCH_GPU__DEVICES = 0;1: not a list of GPUs; "
        "write all, or indices and UUIDs separated by commas, such as 0,1",
    ),
    env_bad(
        "STALLWATCH_GPU__DEVICES",
        "0,,1",
        "STALLWATCH_GPU__DEVICES = 0,,1: an empty entry is not a GPU; "
        "write all, or indices and UUIDs separated by commas, such as 0,1",
    ),
    env_bad("STALLWATCH_GPU__DEVICES", "0, 0", "STALLWATCH_GPU__DEVICES = 0, 0: names a GPU twice; name each GPU once"),
    env_bad(
        "STALLWATCH_CANARY__MODEL",
        "a\x1bb",
        r"STALLWATCH_CANARY__MODEL = a\x1bb: holds control characters; write it without them",
    ),
    # addresses
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "vllm:8000",
        "STALLWATCH_ENGINE__URL = vllm:8000: not an http:// or https:// address; write http://vllm:8000",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "unix:///run/vllm.sock",
        "STALLWATCH_ENGINE__URL = unix:///run/vllm.sock: not an http:// or https:// address; write http://HOST:PORT",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "http://me:hunter2@vllm:8000",
        "STALLWATCH_ENGINE__URL = http://***@vllm:8000: carries credentials; "
        "take them out and give the key by an api_key_file setting",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "me:hunter2@vllm:8000",
        "STALLWATCH_ENGINE__URL = ***@vllm:8000: carries credentials; "
        "take them out and give the key by an api_key_file setting",
    ),
    env_bad(
        "STALLWATCH_CANARY__URL",
        "http://vllm:8000/?api_key=hunter2",
        "STALLWATCH_CANARY__URL = http://vllm:8000/?***: carries a query or a fragment; "
        "end the address with the host, the port or a path prefix",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "http://vllm:8000#x",
        "STALLWATCH_ENGINE__URL = http://vllm:8000#***: carries a query or a fragment; "
        "end the address with the host, the port or a path prefix",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "http://vllm:8000/v1/",
        "STALLWATCH_ENGINE__URL = http://vllm:8000/v1/: ends in /v1, which stallwatch adds itself; "
        "write http://vllm:8000",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "http://vllm:80000",
        "STALLWATCH_ENGINE__URL = http://vllm:80000: not a URL (Port out of range 0-65535); "
        "write http://HOST:PORT, an IPv6 address in brackets",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "http://",
        "STALLWATCH_ENGINE__URL = http://: not a URL (empty host); write http://HOST:PORT",
    ),
    env_bad(
        "STALLWATCH_ENGINE__URL",
        "http://127.0.0.1:9709",
        "STALLWATCH_ENGINE__URL = http://127.0.0.1:9709 with web.port = 9709 (default): "
        "stallwatch would listen where it looks for the server; choose another web.port, or correct engine.url",
    ),
    # combinations
    bad(
        "timeout below interval",
        "--engine.timeout_seconds = 1 with STALLWATCH_ENGINE__INTERVAL_SECONDS = 5: "
        "an answer would be given up before the next one is even due; set engine.timeout_seconds to 5 or more",
        flags=("--engine.timeout_seconds", "1"),
        env={"STALLWATCH_ENGINE__INTERVAL_SECONDS": "5"},
    ),
    env_bad(
        "STALLWATCH_GPU__TIMEOUT_SECONDS",
        "0.1",
        "STALLWATCH_GPU__TIMEOUT_SECONDS = 0.1 with gpu.interval_seconds = 0.2 (default): "
        "an answer would be given up before the next one is even due; set gpu.timeout_seconds to 0.2 or more",
    ),
    bad(
        "full page more often than the counters",
        "--engine.interval_seconds = 40 with engine.full_interval_seconds = 30 (default): "
        "the whole page would be due more often than the counters are read; "
        "set engine.full_interval_seconds to 40 or more",
        flags=("--engine.interval_seconds=40",),
    ),
    env_bad(
        "STALLWATCH_CANARY__TOKENS",
        "700",
        "STALLWATCH_CANARY__TOKENS = 700 with canary.tokens_per_minute = 600 (default): "
        "one request costs more than the budget of a minute, so none would ever be sent; "
        "set canary.tokens to at most 600 or canary.tokens_per_minute to at least 700",
    ),
    env_bad(
        "STALLWATCH_CANARY__TOKENS_PER_MINUTE",
        "30",
        "STALLWATCH_CANARY__TOKENS_PER_MINUTE = 30 with canary.tokens = 64 (default): "
        "one request costs more than the budget of a minute, so none would ever be sent; "
        "set canary.tokens to at most 30 or canary.tokens_per_minute to at least 64",
    ),
    bad(
        "persistent and only when busy",
        "--canary.mode = persistent with --canary.only_when_busy = true: "
        "a stream that is always open keeps the server busy itself; "
        "set canary.mode to pulse, or canary.only_when_busy to false",
        flags=("--canary.only_when_busy", "--canary.mode", "persistent"),
    ),
    env_bad(
        "STALLWATCH_CANARY__TIMEOUT_SECONDS",
        "10",
        "STALLWATCH_CANARY__TIMEOUT_SECONDS = 10 with stall.ttft_seconds = 10 (default): "
        "the canary would give up before a stall at admission can be seen; set canary.timeout_seconds above 10",
    ),
    env_bad(
        "STALLWATCH_SLO__TTFT_SECONDS",
        "150",
        "STALLWATCH_SLO__TTFT_SECONDS = 150 with canary.timeout_seconds = 120 (default): "
        "the canary would give up before a missed first-token objective can be seen; "
        "set canary.timeout_seconds above 150",
    ),
    env_bad(
        "STALLWATCH_SLO__TARGET",
        "0.9",
        "STALLWATCH_SLO__TARGET = 0.9: the fast-burn alert fires at 14.4 times the error budget, which is 144% of all "
        "seconds and can never happen; set it to 0.9306 or more",
    ),
    env_bad(
        "STALLWATCH_STALL__HANG_SECONDS",
        "0.5",
        "STALLWATCH_STALL__HANG_SECONDS = 0.5 with stall.floor_seconds = 0.5 (default): "
        "every stall would be called a hang; set stall.hang_seconds above 0.5",
    ),
    bad(
        "two keys",
        "STALLWATCH_ENGINE__API_KEY = (hidden) with --engine.api_key_file = {tmp}/key: two keys for one server; "
        "keep engine.api_key_file and remove engine.api_key",
        flags=("--engine.api_key_file", "{tmp}/key"),
        env={"STALLWATCH_ENGINE__API_KEY": "sk-verysecret"},
        setup=lambda tmp: (tmp / "key").write_text("sk-verysecret"),
    ),
    env_bad(
        "STALLWATCH_ENGINE__API_KEY",
        "two words",
        "STALLWATCH_ENGINE__API_KEY = (hidden): holds characters that no HTTP header can carry; "
        "give the key alone, in one line of ASCII",
    ),
    # files that settings name
    env_bad(
        "STALLWATCH_ENGINE__API_KEY_FILE",
        "{tmp}/none",
        "STALLWATCH_ENGINE__API_KEY_FILE = {tmp}/none: no such file; correct the path or mount the file",
    ),
    env_bad(
        "STALLWATCH_CANARY__API_KEY_FILE",
        "{tmp}",
        "STALLWATCH_CANARY__API_KEY_FILE = {tmp}: is not a file; correct the path or mount the file",
    ),
    bad(
        "empty key",
        "--engine.api_key_file = {tmp}/key: is empty; write the content into it or remove the setting",
        flags=("--engine.api_key_file", "{tmp}/key"),
        setup=lambda tmp: (tmp / "key").write_text("\n"),
    ),
    bad(
        "key of two lines",
        "--engine.api_key_file = {tmp}/key: holds more than a key; write the key alone into it, in one line of ASCII",
        flags=("--engine.api_key_file", "{tmp}/key"),
        setup=lambda tmp: (tmp / "key").write_text("one\ntwo\n"),
    ),
    bad(
        "no certificate",
        "--engine.ca_file = {tmp}/ca.pem: holds no certificate; give a file of certificates in PEM form",
        flags=("--engine.ca_file", "{tmp}/ca.pem"),
        setup=lambda tmp: (tmp / "ca.pem").write_text("hello"),
    ),
    bad(
        "recorder into a file",
        "--recorder.directory = {tmp}/file: is a file; give a directory; it is made when missing",
        flags=("--recorder.directory", "{tmp}/file"),
        setup=lambda tmp: (tmp / "file").write_text(""),
    ),
    env_bad(
        "STALLWATCH_CANARY__PAUSE_FILE",
        "{tmp}",
        "STALLWATCH_CANARY__PAUSE_FILE = {tmp}: is a directory; give the path of a file, which need not exist",
    ),
    # who may read our own pages
    bad(
        "certificate without key",
        "--web.tls_cert_file = {tmp}/server/tls.crt: has no effect without web.tls_key_file; "
        "set web.tls_key_file, or remove web.tls_cert_file",
        flags=("--web.tls_cert_file", "{tmp}/server/tls.crt"),
        setup=lambda tmp: issue(tmp / "server"),
    ),
    bad(
        "key without certificate",
        "--web.tls_key_file = {tmp}/server/tls.key: has no effect without web.tls_cert_file; "
        "set web.tls_cert_file, or remove web.tls_key_file",
        flags=("--web.tls_key_file", "{tmp}/server/tls.key"),
        setup=lambda tmp: issue(tmp / "server"),
    ),
    bad(
        "client authorities without TLS",
        "STALLWATCH_WEB__CLIENT_CA_FILE = {tmp}/server/tls.crt: has no effect without web.tls_cert_file; "
        "set web.tls_cert_file, or remove web.client_ca_file",
        env={"STALLWATCH_WEB__CLIENT_CA_FILE": "{tmp}/server/tls.crt"},
        setup=lambda tmp: issue(tmp / "server"),
    ),
    bad(
        "certificate and key exchanged",
        "--web.tls_cert_file = {tmp}/server/tls.key: holds no certificate; "
        "give a file of certificates in PEM form, ours first",
        "--web.tls_key_file = {tmp}/server/tls.crt: holds no private key; give a file with the private key in PEM form",
        flags=("--web.tls_cert_file={tmp}/server/tls.key", "--web.tls_key_file={tmp}/server/tls.crt"),
        setup=lambda tmp: issue(tmp / "server"),
    ),
    bad(
        "key of another certificate",
        "--web.tls_key_file = {tmp}/other/tls.key: is not the key of the certificate in web.tls_cert_file; "
        "give the two files of one pair",
        flags=("--web.tls_cert_file={tmp}/server/tls.crt", "--web.tls_key_file={tmp}/other/tls.key"),
        setup=lambda tmp: (issue(tmp / "server"), issue(tmp / "other")),
    ),
    bad(
        "encrypted key",
        "--web.tls_key_file = {tmp}/tls.key: cannot be used (the private key is encrypted); "
        "give the private key in PEM form, without a passphrase",
        flags=("--web.tls_cert_file={tmp}/server/tls.crt", "--web.tls_key_file={tmp}/tls.key"),
        setup=lambda tmp: (issue(tmp / "server"), (tmp / "tls.key").write_text(AN_ENCRYPTED_KEY)),
    ),
    bad(
        "certificate missing",
        "--web.tls_cert_file = {tmp}/none: no such file; correct the path or mount the file",
        flags=("--web.tls_cert_file={tmp}/none", "--web.tls_key_file={tmp}/server/tls.key"),
        setup=lambda tmp: issue(tmp / "server"),
    ),
    bad(
        "client authorities that are none",
        "--web.client_ca_file = {tmp}/server/tls.key: holds no certificate; give a file of certificates in PEM form",
        flags=(
            "--web.tls_cert_file={tmp}/server/tls.crt",
            "--web.tls_key_file={tmp}/server/tls.key",
            "--web.client_ca_file={tmp}/server/tls.key",
        ),
        setup=lambda tmp: issue(tmp / "server"),
    ),
    env_bad(
        "STALLWATCH_WEB__BEARER_TOKEN_FILE",
        "{tmp}/none",
        "STALLWATCH_WEB__BEARER_TOKEN_FILE = {tmp}/none: no such file; correct the path or mount the file",
    ),
    bad(
        "empty tokens",
        "--web.bearer_token_file = {tmp}/tokens: is empty; write the content into it or remove the setting",
        flags=("--web.bearer_token_file={tmp}/tokens",),
        setup=lambda tmp: (tmp / "tokens").write_text("\n"),
    ),
    bad(
        "tokens of two words",
        "--web.bearer_token_file = {tmp}/tokens: line 2 is no token, which is one word of printable ASCII; "
        "write one token a line",
        flags=("--web.bearer_token_file={tmp}/tokens",),
        setup=lambda tmp: (tmp / "tokens").write_text("# ours\nhunter2 hunter2\n"),
    ),
    bad(
        "passwords in clear",
        "--web.basic_auth_file = {tmp}/users: line 1: not a hash of the form scrypt$n$r$p$salt$hash; "
        "write the lines that `stallwatch hash-password USER` prints",
        flags=("--web.basic_auth_file={tmp}/users",),
        setup=lambda tmp: (tmp / "users").write_text("me:hunter2\n"),
    ),
    bad(
        "htpasswd of bcrypt",
        "--web.basic_auth_file = {tmp}/users: line 1: bcrypt hashes are not understood, only those of `stallwatch "
        "hash-password`; write the lines that `stallwatch hash-password USER` prints",
        flags=("--web.basic_auth_file={tmp}/users",),
        setup=lambda tmp: (tmp / "users").write_text("me:$2y$05$hunter2\n"),
    ),
    # the file of settings
    env_bad(
        "STALLWATCH_CONFIG",
        "{tmp}/none.yaml",
        "STALLWATCH_CONFIG = {tmp}/none.yaml: no such file; give the path of a YAML or TOML file",
    ),
    bad(
        "directory as file",
        "--config = {tmp}/d.yaml: is not a file; give the path of a YAML or TOML file",
        flags=("--config={tmp}/d.yaml",),
        setup=lambda tmp: (tmp / "d.yaml").mkdir(),
    ),
    bad(
        "suffix",
        "--config = {file}: the kind of the file is told by its name; call it .yaml, .yml or .toml",
        file="{}",
        suffix=".json",
    ),
    bad(
        "YAML syntax",
        "--config = {file}: line 2, column 9: mapping values are not allowed here; correct the YAML",
        file="engine:\n  url: a: b\n",
    ),
    bad(
        "YAML tab",
        "--config = {file}: line 2, column 1: found character '\\t' that cannot start any token; correct the YAML",
        file="engine:\n\turl: x\n",
    ),
    bad(
        "YAML key twice",
        "--config = {file}: line 3: mode is given twice, first in line 2; keep one of them",
        file="canary:\n  mode: pulse\n  mode: persistent\n",
    ),
    bad(
        "YAML room twice",
        "--config = {file}: line 3: slo is given twice, first in line 1; keep one of them",
        file="slo:\n  target: 0.95\nslo:\n  itl_seconds: 0.2\n",
    ),
    bad(
        "YAML list",
        "--config = {file}: not a mapping of groups to their settings; "
        "write a group such as engine: and indent below it",
        file="- engine\n",
    ),
    bad(
        "YAML tag",
        "--config = {file}: line 2: the tag !env has no meaning here; write the value itself",
        file="engine:\n  url: !env URL\n",
    ),
    bad(
        "YAML depth",
        "--config = {file}: nested too deeply; write groups and their settings, nothing deeper",
        file="[" * 5000,
    ),
    bad(
        "TOML syntax",
        "--config = {file}: expected '=' after a key in a key/value pair (at line 2, column 6); correct the TOML",
        file="[canary]\nmode persistent\n",
        suffix=".toml",
    ),
    bad("huge file", "--config = {file}: larger than 1 MiB; give a file of settings", file="#" * (1024 * 1024 + 1)),
    bad("room", "{file}:1: cannary: not a group of settings; did you mean canary?", file="cannary:\n  mode: pulse\n"),
    bad(
        "flat name in YAML",
        "{file}:2: canary.mode: not a group of settings; write canary: and indented below it mode: ...",
        file="\ncanary.mode: pulse\n",
    ),
    bad(
        "flat name in TOML",
        "{file}: url: not a group of settings; write [engine] and below it url = ...",
        file='url = "http://h:1"\n',
        suffix=".toml",
    ),
    bad(
        "room without settings",
        "{file}:1: engine: a group of settings, not a value; write its settings below it, such as url",
        file="engine: http://h:1\n",
    ),
    bad(
        "name in file",
        "{file}:2: canary.modus: not a setting; did you mean canary.mode?",
        file="canary:\n  modus: pulse\n",
    ),
    bad(
        "value in file",
        "{file}:3: slo.target = 95: too large; it is a share: write 0.95",
        file="slo:\n  itl_seconds: 0.2\n  target: 95\n",
    ),
    bad(
        "value in TOML",
        "{file}: web.port = http: not a whole number; write a whole number from 0 to 65535",
        file='[web]\nport = "http"\n',
        suffix=".toml",
    ),
    bad(
        "list in file",
        "{file}:2: web.port: takes one value, not a list; write a single value",
        file="web:\n  port: [1, 2]\n",
    ),
    bad(
        "group in file",
        "{file}:2: web.port: takes one value, not a group; write a single value",
        file="web:\n  port: {a: 1}\n",
    ),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_each_mistake_is_refused_with_its_own_message(case: Bad, tmp_path: Path) -> None:
    """Every kind of bad configuration gives exactly the lines that say what is wrong and what to do."""
    if case.setup:
        case.setup(tmp_path)
    file = tmp_path / f"settings{case.suffix}"
    flags = [flag.replace("{tmp}", str(tmp_path)) for flag in case.flags]
    if case.file is not None:
        file.write_text(case.file)
        flags += ["--config", str(file)]
    environ = {name: value.replace("{tmp}", str(tmp_path)) for name, value in case.env.items()}
    with pytest.raises(BadConfiguration) as refused:
        load(flags, environ)
    lines = tuple(
        str(fault).replace(str(file), "{file}").replace(str(tmp_path), "{tmp}") for fault in refused.value.faults
    )
    assert lines == case.lines
    assert not any(secret in line for line in lines for secret in ("hunter2", "sk-"))


def test_every_fault_of_every_source_is_reported_at_once(tmp_path: Path) -> None:
    """A person with five mistakes hears of five, not of the first one."""
    file = tmp_path / "s.yaml"
    file.write_text("slo:\n  target: 0.5\ngpu:\n  interval_seconds: 0\nlog:\n  levle: info\n")
    with pytest.raises(BadConfiguration) as refused:
        load(
            ["--canary.mode", "x", "--engine.timeout_seconds", "0.1", "--config", str(file)],
            {"STALLWATCH_WEB_PORT": "80", "STALLWATCH_ENGINE__API_KEY_FILE": "/none"},
        )
    subjects = [fault.subject.rpartition(": ")[2].partition(" ")[0] for fault in refused.value.faults]
    assert subjects == [
        "STALLWATCH_WEB_PORT",
        "log.levle",
        "--canary.mode",
        "gpu.interval_seconds",
        "STALLWATCH_ENGINE__API_KEY_FILE",
        "--engine.timeout_seconds",
        "slo.target",
    ]


def test_an_unreadable_file_is_not_followed_by_false_combinations() -> None:
    """What an unread file might have said is not held against the flags."""
    with pytest.raises(BadConfiguration) as refused:
        load(["--config", "/none.yaml", "--engine.timeout_seconds", "0.1"], {})
    assert [fault.subject for fault in refused.value.faults] == ["--config = /none.yaml"]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Each value comes from the first source that names it, and keeps the name of that source."""
    file = tmp_path / "s.toml"
    file.write_text("[slo]\nitl_seconds = 0.2\nttft_seconds = 3\n[canary]\ntokens = 32\n[web]\nport = 1\n")
    loaded = load(
        ["--slo.itl_seconds=0.4", "--config", str(file)],
        {"STALLWATCH_SLO__ITL_SECONDS": "0.3", "STALLWATCH_SLO__TTFT_SECONDS": "4", "STALLWATCH_WEB__PORT": ""},
    )
    settings = loaded.settings
    assert (settings.slo.itl_seconds, settings.slo.ttft_seconds, settings.canary.tokens) == (0.4, 4, 32)
    assert settings.web.port == 1
    assert settings.slo.target == 0.99
    assert loaded.given["slo.itl_seconds"].place == "--slo.itl_seconds"
    assert loaded.given["slo.ttft_seconds"].place == "STALLWATCH_SLO__TTFT_SECONDS"
    assert loaded.given["canary.tokens"].place == f"{file}: canary.tokens"


def test_no_configuration_at_all_is_valid() -> None:
    """Beside a vLLM on its default port nothing needs to be said, and nothing is warned of."""
    assert load([], {}) == Configuration(Settings(), {}, ())


@pytest.mark.parametrize("name", SERVICE_LINKS)
def test_service_links_of_kubernetes_are_ignored(name: str) -> None:
    """The names that Kubernetes injects beside a Service called stallwatch neither stop us nor change a setting."""
    loaded = load([], {name: SERVICE_LINKS[name]})
    assert loaded == Configuration(Settings(), {}, ())


def test_a_port_that_kubernetes_did_not_write_is_ignored_with_a_hint() -> None:
    """STALLWATCH_PORT belongs to Kubernetes; a number in it was written by a person who meant the setting."""
    (caution,) = load([], {"STALLWATCH_PORT": "9710"}).cautions
    assert str(caution) == (
        "STALLWATCH_PORT = 9710: is a name of Kubernetes and ignored; did you mean STALLWATCH_WEB__PORT?"
    )


def test_variables_of_our_own_tools_are_ignored() -> None:
    """The location of the real vLLM for tests is no setting."""
    assert load([], {"STALLWATCH_VLLM_HOME": "/x", "HOME": "/root"}).given == {}


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_is_not_set(empty: str) -> None:
    """A manifest that leaves a value blank means the default."""
    environ = {"STALLWATCH_ENGINE__API_KEY_FILE": empty, "STALLWATCH_CONFIG": empty, "STALLWATCH_SLO__TARGET": empty}
    assert load([], environ).settings == Settings()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "---\n",
        "null\n",
        "canary:\nengine:\n  # url: x\n",
        "canary:\n  model: ''\n  tokens:\n  mode: ~\n",
        "﻿engine: {}\n",
    ],
)
def test_a_file_that_says_nothing_leaves_the_defaults(text: str, tmp_path: Path) -> None:
    """Empty files, groups and values of a template mean the default."""
    file = tmp_path / "s.yaml"
    file.write_text(text, encoding="utf-8")
    assert load(["--config", str(file)], {}).settings == Settings()


@pytest.mark.parametrize(
    ("flags", "enabled"),
    [
        (["--canary.enabled", "false"], False),
        (["--canary.enabled=no"], False),
        (["--no-canary.enabled"], False),
        (["--canary.enabled", "--web.port", "1"], True),
        (["--no-canary.enabled", "--canary.enabled"], True),
        (["--canary.enabled", "off", "--canary.enabled", "on"], True),
    ],
)
def test_switches_can_be_written_in_the_usual_ways(flags: list[str], enabled: bool) -> None:  # noqa: FBT001
    """A switch takes a word, stands alone, or is negated; the last one counts."""
    assert load(flags, {}).settings.canary.enabled is enabled


def test_yaml_words_and_numbers_are_read_as_written(tmp_path: Path) -> None:
    """YAML's own ideas of numbers and booleans do not change a value."""
    file = tmp_path / "s.yml"
    file.write_text(
        "engine: {url: 'https://[::1]:8443/prefix'}\ncanary: {model: 1e3, skip_when_waiting: 010}\n"
        "gpu: {enabled: yes, devices: [0, GPU-5a]}\nrecorder: {max_bytes: 2.68435456e+08}\nweb: {host: '[::1]'}\n"
    )
    settings = load(["--config", str(file)], {}).settings
    assert str(settings.engine.url) == "https://[::1]:8443/prefix"
    assert (settings.canary.model, settings.canary.skip_when_waiting) == ("1e3", 10)
    assert (settings.gpu.enabled, settings.gpu.device_names) == ("true", ("0", "GPU-5a"))
    assert (settings.recorder.max_bytes, settings.web.host) == (256 * 1024 * 1024, "::1")


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    """Both kinds of file reach every kind of value."""
    (tmp_path / "s.toml").write_text(
        '[canary]\nenabled = false\ntokens = 8\n[slo]\ntarget = 0.95\n[gpu]\ndevices = [0, 1]\n[log]\nlevel = "debug"\n'
    )
    (tmp_path / "s.yaml").write_text(
        "canary: {enabled: false, tokens: 8}\nslo: {target: 0.95}\ngpu: {devices: '0,1'}\nlog: {level: debug}\n"
    )
    toml, yaml = (load(["--config", str(tmp_path / name)], {}).settings for name in ("s.toml", "s.yaml"))
    assert toml == yaml
    assert toml.canary.enabled is False


@pytest.mark.parametrize(
    ("given", "tokens", "budget"),
    [
        ({}, 64, 600),
        ({"tokens": 100}, 100, 600),
        ({"mode": "persistent"}, 2048, None),
        ({"mode": "persistent", "tokens": 512}, 512, None),
        ({"mode": "persistent", "tokens_per_minute": 600}, 600, 600),
        ({"mode": "persistent", "tokens_per_minute": 9000}, 2048, 9000),
    ],
)
def test_defaults_that_depend_on_the_mode(given: dict[str, Any], tokens: int, budget: int | None) -> None:
    """Length and budget of canary requests follow the mode unless they were given."""
    canary = CanarySettings(**given)
    assert (canary.stream_tokens, canary.token_budget) == (tokens, budget)


def test_the_timeout_follows_a_longer_interval() -> None:
    """Who only polls more rarely need not lengthen the timeout as well."""
    assert load(["--engine.interval_seconds", "10"], {}).settings.engine.timeout_seconds == 10
    assert Settings().engine.timeout_seconds == 2


@pytest.mark.parametrize(
    ("flags", "cautions"),
    [
        (
            ["--canary.interval_seconds", "2"],
            [
                (
                    "--canary.interval_seconds = 2 with canary.tokens_per_minute = 600 (default): the pulses would "
                    "cost 1920 tokens a minute, so some will be skipped; set canary.interval_seconds to 6.4 or more"
                )
            ],
        ),
        (
            ["--canary.mode=persistent", "--canary.tokens_per_minute=1000"],
            [
                (
                    "--canary.tokens_per_minute = 1000 with --canary.mode = persistent: the stream stays closed "
                    "whenever the budget of a minute is spent, and sees no gap meanwhile; "
                    "leave canary.tokens_per_minute unset in persistent mode"
                )
            ],
        ),
        (
            ["--slo.itl_seconds", "1"],
            [
                (
                    "--slo.itl_seconds = 1 with stall.floor_seconds = 0.5 (default): a gap that keeps the promise can "
                    "open a stall; set stall.floor_seconds to 1 or more"
                )
            ],
        ),
        (
            ["--slo.ttft_seconds", "20"],
            [
                (
                    "--slo.ttft_seconds = 20 with stall.ttft_seconds = 10 (default): a first token that keeps the "
                    "promise can come out of a stall; set stall.ttft_seconds to 20 or more"
                )
            ],
        ),
        (
            ["--engine.insecure_skip_verify", "--engine.url", "https://vllm"],
            [
                (
                    "--engine.insecure_skip_verify = true: whoever answers at that address is believed; "
                    "set engine.ca_file and engine.server_name instead"
                )
            ],
        ),
        (
            ["--engine.server_name", "vllm"],
            [
                (
                    "--engine.server_name = vllm with engine.url = http://127.0.0.1:8000 (default): has no effect "
                    "without https; write https:// in engine.url or remove engine.server_name"
                )
            ],
        ),
        (["--no-canary.enabled", "--canary.interval_seconds", "2"], []),
        (["--canary.pause_file", "/not/mounted/yet", "--recorder.directory", "/not/made/yet"], []),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(flags: list[str], cautions: list[str]) -> None:
    """Settings that work but surprise are accepted with a sentence, and a disabled canary's are not judged."""
    assert [str(caution) for caution in load(flags, {}).cautions] == cautions


def test_credentials_in_clear_text_are_a_warning(tmp_path: Path) -> None:
    """What opens our pages should not travel unprotected, except within the machine."""
    path, pair = tmp_path / "tokens", issue(tmp_path)
    path.write_text("one\n")
    flags = [f"--web.bearer_token_file={path}"]
    (caution,) = load(flags, {}).cautions
    assert str(caution) == (
        f"--web.bearer_token_file = {path}: clients send what opens our pages in clear text; "
        "set web.tls_cert_file and web.tls_key_file unless this network is trusted"
    )
    assert load([*flags, "--web.host=::1"], {}).cautions == ()
    assert load([*flags, f"--web.tls_cert_file={pair.cert}", f"--web.tls_key_file={pair.key}"], {}).cautions == ()


def test_a_key_from_the_environment_works_with_a_warning_and_is_never_shown() -> None:
    """A key outside a file is accepted; no representation of the settings repeats it."""
    loaded = load(["--engine.url", "http://vllm:8000"], {"STALLWATCH_ENGINE__API_KEY": "sk-verysecret\n"})
    assert loaded.settings.engine.api_key == SecretStr("sk-verysecret")
    cautions = [str(caution) for caution in loaded.cautions]
    assert cautions == [
        (
            "STALLWATCH_ENGINE__API_KEY = (hidden): whoever may read this process's environment or that file can read "
            "the key, and it is never read again; mount it as a file and set engine.api_key_file"
        ),
        "--engine.url = http://vllm:8000: the key travels in clear text; use https unless this network is trusted",
    ]
    for text in (
        repr(loaded.settings),
        str(loaded.settings.model_dump(mode="json")),
        str(loaded.shown()),
        str(cautions),
    ):
        assert "verysecret" not in text


def test_the_canary_uses_the_engines_key_at_the_engines_address_only(tmp_path: Path) -> None:
    """One key is enough for one server, and it never goes to another."""
    key = tmp_path / "key"
    key.write_text("sk\n")
    same = load(["--engine.api_key_file", str(key)], {}).settings
    assert same.canary_access == same.engine_access
    prefixed = load(["--engine.api_key_file", str(key), "--canary.url", "http://127.0.0.1:8000/p"], {}).settings
    assert prefixed.canary_access.api_key_file == key
    for other in ("http://gateway:8000", "http://127.0.0.1:8001", "https://127.0.0.1:8000"):
        access = load(["--engine.api_key_file", str(key), "--canary.url", other], {}).settings.canary_access
        assert access.api_key_file is None


def test_every_number_refuses_what_is_not_finite() -> None:
    """No setting takes NaN or an infinity, from a person or from code."""
    numbers = [
        (room, name)
        for room, info in Settings.model_fields.items()
        for name, one in info.annotation.model_fields.items()  # type: ignore[union-attr]
        if one.annotation in {int, float, int | None}
    ]
    assert len(numbers) > 20
    for room, name in numbers:
        for number in (math.nan, math.inf, -math.inf):
            with pytest.raises(ValidationError):
                Settings.model_validate({room: {name: number}})


def test_settings_from_code_refuse_impossible_combinations_too() -> None:
    """Tests and tools that build settings themselves meet the same rules, and cannot change them afterwards."""
    with pytest.raises(ValidationError, match="would be given up before"):
        Settings.model_validate({"engine": {"interval_seconds": 5, "timeout_seconds": 1}})
    with pytest.raises(ValidationError, match="canary would give up"):
        Settings.model_validate({"canary": {"timeout_seconds": 1}})
    with pytest.raises(ValidationError, match="frozen"):
        Settings().slo.target = 0.5  # type: ignore[misc]


def test_the_lowest_target_is_the_first_whose_alert_can_fire() -> None:
    """The bound that the message names is accepted, and just below it is refused."""
    bound = round(1 - 1 / FAST_BURN_FACTOR, 4)
    assert load(["--slo.target", str(bound)], {}).settings.slo.target == bound == 0.9306
    with pytest.raises(BadConfiguration):
        load(["--slo.target", "0.9305"], {})


def test_every_setting_has_one_sentence_that_describes_it() -> None:
    """Help and reference are never blank: a sentence each, that ends like one."""
    for name, info in configuration._fields():
        assert info.description is not None, name
        assert info.description.endswith("."), name
        assert info.description[0].isupper() or info.description[0] == "`", name


def test_no_two_settings_differ_only_in_separators() -> None:
    """A variable with a wrong number of underscores has one right reading."""
    names = list(configuration._known())
    assert len({configuration._plain(name) for name in names}) == len(names) > 50
    for name in names:
        variable = configuration.PREFIX + configuration._plain(name).upper()
        assert configuration.nearest(variable.removeprefix(configuration.PREFIX), names) == name


def test_the_configuration_page_is_fresh() -> None:
    """docs/configuration.md is what the models say: python -m stallwatch.configuration > docs/configuration.md."""
    assert PAGE.read_text(encoding="utf-8") == configuration.reference_markdown()


def test_the_example_of_the_page_loads(tmp_path: Path) -> None:
    """The file that the page shows is accepted as it stands."""
    file = tmp_path / "s.yaml"
    file.write_text(configuration._EXAMPLE)
    assert load(["--config", str(file)], {}).cautions == ()


NAMES = st.sampled_from([*configuration._known(), "engine", "canary", "config", "no-canary.enabled", "x", ""])
VALUES = st.one_of(
    st.text(max_size=20), st.sampled_from(["nan", "-1", "1e400", "9" * 5000, "http://[", "//a@b:c@d", "\x00"])
)
FILES = st.one_of(
    st.binary(max_size=60),
    st.text(alphabet="abc:-[]{}&*!|>'\"%@` \n\t0\ufeff\x00", max_size=60).map(str.encode),
    st.lists(st.tuples(NAMES, VALUES), max_size=4).map(lambda rows: repr(dict(rows)).encode("utf-8", "replace")),
    st.tuples(NAMES, VALUES).map(lambda row: f"{row[0].replace('.', ': {')}: {row[1]!r}}}".encode("utf-8", "replace")),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flags=st.lists(st.tuples(NAMES, VALUES), max_size=3),
    variables=st.dictionaries(NAMES, VALUES, max_size=3),
    content=FILES,
    suffix=st.sampled_from([".yaml", ".toml"]),
)
def test_no_input_crashes_the_loader(
    flags: list[tuple[str, str]], variables: dict[str, str], content: bytes, suffix: str, tmp_path: Path
) -> None:
    """Whatever flags, environment and file hold, the answer is settings or faults of one printable line each."""
    file = tmp_path / f"s{suffix}"
    file.write_bytes(content)
    arguments = [f"--{name}={value}" for name, value in flags]
    environ = {f"STALLWATCH_{name.replace('.', '__').upper()}": value for name, value in variables.items()}
    faults: Sequence[configuration.Fault] = ()
    try:
        load([*arguments, "--config", str(file)], environ)
    except BadConfiguration as refused:
        faults = refused.faults
    for fault in faults:
        assert str(fault).isprintable(), repr(str(fault))
