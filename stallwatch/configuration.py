"""From flags, environment and a file to `Settings`, or to every fault at once in words that a person can act on.

Each value keeps the place where it was given, because a fault that does not say where is half a message. The reading
is our own: a settings library reports one kind of source after the other, forgets which one a value came from, lets a
misspelt variable pass, and takes as long to import as everything else that a short command does. Importing this module
loads no models: the health probe reads two settings with it every few seconds.
"""

# ruff: noqa: PLC0415 (models, YAML and TLS are loaded only by what needs them)

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from stallwatch.settings import Objection, Settings

PREFIX = "STALLWATCH_"
CONFIG_VARIABLE = "STALLWATCH_CONFIG"
# Variables of that prefix that other programs of this project read.
FOREIGN_VARIABLES = frozenset({"STALLWATCH_VLLM_HOME"})
MAX_FILE_BYTES = 1024 * 1024

# Kubernetes injects these into every pod of a namespace that has a Service called `stallwatch` or `stallwatch-...`.
_SERVICE_LINK = re.compile(
    r"STALLWATCH_(?:[A-Z0-9_]+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_LINK_PORT = re.compile(r"STALLWATCH_(?:[A-Z0-9_]+_)?PORT")
_SERVICE_LINK_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)

_SHOWN_CHARACTERS = 200
_HELP = "`stallwatch run --help` lists the settings"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, with what to do about it."""

    subject: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return _printable(f"{self.subject}: {self.problem}; {self.remedy}")


class BadConfiguration(Exception):  # noqa: N818 (a state of the input, not an error of ours)
    """The command cannot start; every fault that could be found is in it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Given:
    """A value as a person wrote it, and where."""

    text: str
    place: str
    """The setting's name in the spelling of its source: a flag, a variable, or a line of a file."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the sources need to know of one setting."""

    name: str
    is_switch: bool = False
    is_secret: bool = False

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """Its spelling in the environment."""
        return PREFIX + self.name.replace(".", "__").upper()


@dataclass(frozen=True, slots=True)
class Configuration:
    """Valid settings, where each one that is not a default was given, and what is worth a warning."""

    settings: "Settings"
    given: Mapping[str, Given]
    cautions: tuple[Fault, ...]

    def shown(self) -> dict[str, str]:
        """The settings that were given, for the log: secrets hidden."""
        known = _known()
        return {name: shown(given.text, secret=known[name].is_secret) for name, given in self.given.items()}


@dataclass(slots=True)
class Reading:
    """What the sources say, before any value is judged."""

    given: dict[str, Given] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    cautions: list[Fault] = field(default_factory=list)
    complete: bool = True
    """Whether every source could be read; otherwise combinations cannot be judged."""


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> Configuration:
    """The settings of a command. Raises `BadConfiguration` with every fault that can be found."""
    reading = read(arguments, environ, _known())
    settings, objections = _validate(reading)
    reading.faults.extend(_file_faults(settings, reading.given))
    reading.faults.extend(_objection_fault(objection, reading.given) for objection in objections)
    if reading.faults:
        raise BadConfiguration(reading.faults)
    cautions = [_objection_fault(objection, reading.given) for objection in settings.cautions()]
    return Configuration(settings, reading.given, (*reading.cautions, *cautions))


def read(
    arguments: Sequence[str], environ: Mapping[str, str], known: Mapping[str, Setting], *, partial: bool = False
) -> Reading:
    """Flags over environment over file, unjudged. `partial`: names outside `known` in the latter two are not ours."""
    reading = Reading()
    flags, flag_config = _read_flags(arguments, known, reading)
    variables, variable_config = _read_environment(environ, known, reading, partial=partial)
    config = flag_config or variable_config
    if config is not None:
        reading.given.update(_read_file(config, known, reading, partial=partial))
    reading.given.update(variables)
    reading.given.update(flags)
    return reading


# --- names ---------------------------------------------------------------------------------------------------------


def _known() -> dict[str, Setting]:
    return {
        name: Setting(name, is_switch=info.annotation is bool, is_secret=_kind(info).__name__ == "SecretStr")
        for name, info in _fields()
    }


def _fields() -> Iterator[tuple[str, "FieldInfo"]]:
    from stallwatch.settings import Settings

    for room, room_info in Settings.model_fields.items():
        model: Any = room_info.annotation
        for name, info in model.model_fields.items():
            yield f"{room}.{name}", info


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, whatever separators were used."""
    names = {_plain(one): one for one in known}
    wanted = _plain(name)
    if wanted in names:
        return names[wanted]
    rooms = {one.partition(".")[0] for one in names.values()}
    room = next((one for one in rooms if wanted.startswith(f"{one}_")), None)
    if room is not None:
        # Within a room the shared first half would make every name look alike.
        key = wanted.removeprefix(f"{room}_")
        siblings = _tails(one for one in names.values() if one.startswith(f"{room}."))
        return _close(key, siblings, 0.6) or _tails(names.values()).get(key)
    tails = _tails(names.values())
    return tails.get(wanted) or _close(wanted, names, 0.7) or _close(wanted, tails, 0.75)


def _tails(names: Iterable[str]) -> dict[str, str]:
    tails: dict[str, str] = {}
    for name in names:
        tail = name.rpartition(".")[2]
        for short in (tail, tail.removesuffix("_seconds")):
            tails.setdefault(short, name)
    return tails


def _close(wanted: str, names: Mapping[str, str], cutoff: float) -> str | None:
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=cutoff)
    return names[close[0]] if close else None


def _meant(name: str, known: Mapping[str, Setting], spelling: str) -> str:
    if difflib.SequenceMatcher(None, _plain(name), "config").ratio() > 0.8:
        return f"did you mean {CONFIG_VARIABLE if spelling == 'variable' else '--config'}?"
    close = nearest(name, known)
    if close is None:
        return f"remove it ({_HELP})"
    return f"did you mean {getattr(known[close], spelling)}?"


# --- flags ---------------------------------------------------------------------------------------------------------


def _read_flags(
    arguments: Sequence[str], known: Mapping[str, Setting], reading: Reading
) -> tuple[dict[str, Given], tuple[str, str] | None]:
    given: dict[str, Given] = {}
    config: tuple[str, str] | None = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            subject = shown(argument)
            reading.faults.append(
                Fault(subject, "an argument that this command does not take", "write --SETTING VALUE")
            )
            continue
        name, equals, text = argument[2:].partition("=")
        setting = known.get(name)
        negated = known.get(name.removeprefix("no-")) if name.startswith("no-") else None
        if negated is not None and negated.is_switch and not equals:
            given[negated.name] = Given("false", argument)
            continue
        if not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif not equals and setting is not None and setting.is_switch:
            text = "true"
        if setting is None and name != "config":
            reading.faults.append(Fault(f"--{shown(name)}", "not a setting", _meant(name, known, "flag")))
        elif setting is not None and setting.is_secret:
            remedy = f"set {setting.variable}, or better {setting.name}_file"
            reading.faults.append(Fault(f"--{name}", "a secret on the command line shows in every `ps`", remedy))
        elif not text.strip():
            metavar = "FILE" if setting is None else "VALUE"
            reading.faults.append(Fault(f"--{name}", "has no value", f"write --{name} {metavar}, or leave it out"))
        elif setting is None:
            config = ("--config", text)
        else:
            given[name] = Given(text, f"--{name}")
    return given, config


# --- environment ---------------------------------------------------------------------------------------------------


def _read_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting], reading: Reading, *, partial: bool
) -> tuple[dict[str, Given], tuple[str, str] | None]:
    variables = {setting.variable: setting for setting in known.values()}
    given: dict[str, Given] = {}
    for name in sorted(environ):
        if not name.upper().startswith(PREFIX) or name in FOREIGN_VARIABLES or name == CONFIG_VARIABLE:
            continue
        text = environ[name]
        if name in variables:
            # A manifest that leaves a value empty means "not set".
            if text.strip():
                given[variables[name].name] = Given(text, name)
            continue
        if partial or _is_service_link(name, text):
            continue
        if _SERVICE_LINK_PORT.fullmatch(name) and name == PREFIX + "PORT":
            # Refusing it could stop a pod for a name that Kubernetes owns.
            reading.cautions.append(
                Fault(
                    f"{name} = {shown(text)}",
                    "is a name of Kubernetes and ignored",
                    "did you mean STALLWATCH_WEB__PORT?",
                )
            )
        elif name.startswith(PREFIX) or name.upper() in variables:
            reading.faults.append(_unknown_variable(name, known))
    config = environ.get(CONFIG_VARIABLE, "").strip()
    return given, (CONFIG_VARIABLE, config) if config else None


def _is_service_link(name: str, text: str) -> bool:
    if _SERVICE_LINK.fullmatch(name):
        return True
    return _SERVICE_LINK_PORT.fullmatch(name) is not None and _SERVICE_LINK_ADDRESS.match(text) is not None


def _unknown_variable(name: str, known: Mapping[str, Setting]) -> Fault:
    rest = name[len(PREFIX) :]
    room = _plain(rest)
    members = [setting for setting in known.values() if setting.name.startswith(f"{room}.")]
    if members:
        return Fault(name, "names a group of settings", f"set one of them, such as {members[0].variable}")
    return Fault(name, "not a setting", _meant(rest, known, "variable"))


# --- file ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """One value of a file: text, a list of texts, a group, or nothing."""

    value: "str | list[str] | dict[str, _Entry] | None"
    line: int | None = None


class _MalformedError(Exception):
    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def _read_file(
    config: tuple[str, str], known: Mapping[str, Setting], reading: Reading, *, partial: bool
) -> dict[str, Given]:
    place, name = config
    path = Path(name)
    try:
        root = _parse(path)
    except _MalformedError as malformed:
        reading.complete = False
        reading.faults.append(Fault(f"{place} = {shown(name)}", malformed.problem, malformed.remedy))
        return {}
    rooms = list(dict.fromkeys(setting.name.partition(".")[0] for setting in known.values()))
    given: dict[str, Given] = {}
    for room, group in root.items():
        where = _where(name, group.line)
        if room not in rooms:
            if not partial:
                reading.faults.append(Fault(f"{where}: {shown(room)}", *_unknown_room(room, rooms, known, path)))
        elif group.value is None:
            continue
        elif not isinstance(group.value, dict):
            example = next(setting.name for setting in known.values() if setting.name.startswith(f"{room}."))
            remedy = f"write its settings below it, such as {example.rpartition('.')[2]}"
            reading.faults.append(Fault(f"{where}: {room}", "a group of settings, not a value", remedy))
        else:
            _read_room(name, room, group.value, known, reading, given, partial=partial)
    return given


def _read_room(
    file: str,
    room: str,
    entries: Mapping[str, _Entry],
    known: Mapping[str, Setting],
    reading: Reading,
    given: dict[str, Given],
    *,
    partial: bool,
) -> None:
    for key, entry in entries.items():
        where, dotted = _where(file, entry.line), f"{room}.{key}"
        if dotted not in known:
            if not partial:
                close = nearest(dotted, known)
                remedy = f"did you mean {close}?" if close else f"remove it ({_HELP})"
                reading.faults.append(Fault(f"{where}: {room}.{shown(key)}", "not a setting", remedy))
            continue
        value = entry.value
        if isinstance(value, list) and dotted == "gpu.devices":
            value = ",".join(value)
        if isinstance(value, dict | list):
            kind = "a list" if isinstance(value, list) else "a group"
            reading.faults.append(Fault(f"{where}: {dotted}", f"takes one value, not {kind}", "write a single value"))
        elif value is not None and value.strip():
            given[dotted] = Given(value, f"{where}: {dotted}")


def _unknown_room(room: str, rooms: Sequence[str], known: Mapping[str, Setting], path: Path) -> tuple[str, str]:
    close = difflib.get_close_matches(room, rooms, n=1, cutoff=0.6)
    meant = nearest(room, known)
    if close and "." not in room:
        return "not a group of settings", f"did you mean {close[0]}?"
    if meant is None:
        return "not a group of settings", f"remove it; the groups are {', '.join(rooms)}"
    group, _, key = meant.partition(".")
    nested = (
        f"[{group}] and below it {key} = ..."
        if path.suffix == ".toml"
        else f"{group}: and indented below it {key}: ..."
    )
    return "not a group of settings", f"write {nested}"


def _where(file: str, line: int | None) -> str:
    return shown(file) if line is None else f"{shown(file)}:{line}"


def _parse(path: Path) -> dict[str, _Entry]:
    suffix = path.suffix.lower()
    if suffix not in {".yaml", ".yml", ".toml"}:
        raise _MalformedError("the kind of the file is told by its name", "call it .yaml, .yml or .toml")
    try:
        if not path.is_file():
            problem = "is not a file" if path.exists() else "no such file"
            raise _MalformedError(problem, "give the path of a YAML or TOML file")
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _MalformedError(f"cannot be read ({_reason(error)})", "correct the path or its permissions") from error
    if len(content) > MAX_FILE_BYTES:
        raise _MalformedError("larger than 1 MiB", "give a file of settings")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _MalformedError(f"not UTF-8 (byte {error.start})", "save it as UTF-8") from error
    return _parse_toml(text) if suffix == ".toml" else _parse_yaml(text)


def _parse_toml(text: str) -> dict[str, _Entry]:
    import tomllib

    def entry(value: object) -> _Entry:
        if isinstance(value, dict):
            return _Entry({str(key): entry(item) for key, item in value.items()})
        if isinstance(value, list):
            return _Entry([str(item) for item in value])
        return _Entry(str(value).lower() if isinstance(value, bool) else str(value))

    try:
        return {key: entry(value) for key, value in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
        raise _MalformedError(problem[:1].lower() + problem[1:], "correct the TOML") from error
    except RecursionError as error:
        raise _MalformedError("nested too deeply", "write groups and their settings, nothing deeper") from error


def _parse_yaml(text: str) -> dict[str, _Entry]:
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _MalformedError(f"{at}{error.problem or error.context}", "correct the YAML") from error
    except yaml.YAMLError as error:
        raise _MalformedError(" ".join(str(error).split())[:200], "correct the YAML") from error
    except RecursionError as error:
        raise _MalformedError("nested too deeply", "write groups and their settings, nothing deeper") from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == "tag:yaml.org,2002:null"):
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _MalformedError(
            "not a mapping of groups to their settings", "write a group such as engine: and indent below it"
        )
    return _yaml_mapping(root, depth=0)


def _yaml_mapping(node: "yaml.MappingNode", *, depth: int) -> dict[str, _Entry]:
    import yaml

    entries: dict[str, _Entry] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise _MalformedError(f"line {line}: a key that is not a name", "write NAME: VALUE")
        if key.value in entries:
            first = entries[key.value].line
            raise _MalformedError(
                f"line {line}: {shown(key.value)} is given twice, first in line {first}", "keep one of them"
            )
        entries[key.value] = _yaml_entry(value, line, depth=depth)
    return entries


def _yaml_entry(node: "yaml.Node", line: int, *, depth: int) -> _Entry:
    import yaml

    if not node.tag.startswith("tag:yaml.org,2002:"):
        raise _MalformedError(f"line {line}: the tag {shown(node.tag)} has no meaning here", "write the value itself")
    if isinstance(node, yaml.MappingNode):
        # Settings are two levels deep; what lies below is refused by its key and need not be read.
        return _Entry(_yaml_mapping(node, depth=depth + 1) if depth == 0 else {}, line)
    if isinstance(node, yaml.SequenceNode):
        return _Entry([str(item.value) for item in node.value], line)
    # The text as written: whether 010, yes or 1:30 is a number is the setting's business, not YAML's.
    return _Entry(None if node.tag.endswith(":null") else str(node.value), line)


# --- values --------------------------------------------------------------------------------------------------------


def _validate(reading: Reading) -> tuple["Settings", list["Objection"]]:
    """The settings without the values that are faulty, which become faults of the reading."""
    from pydantic import ValidationError

    from stallwatch.settings import Settings

    infos = dict(_fields())
    objections: list[Objection] = []
    wrong: set[str] = set()
    try:
        settings = Settings.model_validate(_tree(reading.given), context={"objections": objections})
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            name = ".".join(str(part) for part in detail["loc"][:2])
            # A default that depends on a faulty setting is no fault of its own.
            if name in reading.given and name not in wrong:
                wrong.add(name)
                reading.faults.append(_value_fault(name, reading.given[name], infos[name], detail))
        objections.clear()
        rest = {name: one for name, one in reading.given.items() if name not in wrong}
        settings = Settings.model_validate(_tree(rest), context={"objections": objections})
    if not reading.complete:
        return settings, []
    return settings, [objection for objection in objections if wrong.isdisjoint(objection.about)]


def _tree(given: Mapping[str, Given]) -> dict[str, dict[str, str]]:
    tree: dict[str, dict[str, str]] = {}
    for name, one in given.items():
        room, _, key = name.partition(".")
        tree.setdefault(room, {})[key] = one.text.strip()
    return tree


def _value_fault(name: str, given: Given, info: "FieldInfo", detail: "ErrorDetails") -> Fault:
    from stallwatch.settings import REFUSED

    text, kind, context = given.text.strip(), detail["type"], detail.get("ctx", {})
    subject = f"{given.place} = {shown(text, secret=_kind(info).__name__ == 'SecretStr')}"
    bounds = _range(info)
    if kind == REFUSED:
        return Fault(subject, str(context["problem"]), str(context["remedy"]))
    if kind == "literal_error":
        choices = _choices(info)
        close = difflib.get_close_matches(text.lower(), choices, n=1, cutoff=0.6)
        remedy = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(choices)}"
        return Fault(subject, f"not one of {', '.join(choices)}", remedy)
    if kind == "bool_parsing":
        return Fault(subject, "neither true nor false", "write true or false")
    if kind in {"float_parsing", "int_parsing", "int_from_float", "int_parsing_size"}:
        whole = "whole " if kind.startswith("int") else ""
        return Fault(subject, f"not a {whole}number", _number_remedy(name, text, bounds, whole))
    if kind == "finite_number":
        return Fault(subject, "not a finite number", f"set it {bounds}")
    if kind in {"greater_than", "greater_than_equal"}:
        return Fault(subject, "too small", f"set it {bounds}")
    if kind in {"less_than", "less_than_equal"}:
        ratio = _as_ratio(info, text)
        return Fault(subject, "too large", f"it is a share: write {ratio}" if ratio else f"set it {bounds}")
    if kind == "string_pattern_mismatch":
        return Fault(subject, "holds control characters", "write it without them")
    if kind.startswith("url_"):
        return Fault(subject, f"not a URL ({context.get('error', 'malformed')})", "write http://HOST:PORT")
    return Fault(subject, detail["msg"][:1].lower() + detail["msg"][1:], "correct it")


def _number_remedy(name: str, text: str, bounds: str, whole: str) -> str:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|seconds|m|min|h)", text.lower())
    if match and name.endswith("_seconds"):
        scale = {"ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}.get(match[2], 1.0)
        return f"the unit is in the name: write {float(match[1]) * scale:g}"
    return f"write a {whole}number {bounds}"


def _as_ratio(info: "FieldInfo", text: str) -> str | None:
    bounds = _bounds(info)
    is_share = bounds.get("gt") == 0 and 1 in {bounds.get("lt"), bounds.get("le")}
    try:
        number = float(text)
    except ValueError:
        return None
    return f"{number / 100:g}" if is_share and 1 < number <= 100 and number / 100 != bounds.get("lt") else None


def _bounds(info: "FieldInfo") -> dict[str, float]:
    return {
        key: getattr(constraint, key)
        for constraint in info.metadata
        for key in ("ge", "gt", "le", "lt")
        if getattr(constraint, key, None) is not None
    }


def _range(info: "FieldInfo") -> str:
    bounds = _bounds(info)
    low, high = (
        next((f"{bounds[key]:.15g}" for key in keys if key in bounds), None) for keys in (("ge", "gt"), ("le", "lt"))
    )
    if low is None or high is None:
        return f"above {low}" if "gt" in bounds else f"to at least {low}" if low is not None else ""
    if "gt" in bounds and "lt" in bounds:
        return f"between {low} and {high}, both excluded"
    return f"above {low} and up to {high}" if "gt" in bounds else f"from {low} to {high}"


def _choices(info: "FieldInfo") -> tuple[str, ...]:
    from typing import Literal, get_args, get_origin

    return tuple(str(one) for one in get_args(info.annotation)) if get_origin(info.annotation) is Literal else ()


def _objection_fault(objection: "Objection", given: Mapping[str, Given]) -> Fault:
    known = _known()
    # What a person gave comes first: that is what they can change.
    names = sorted(objection.about, key=lambda name: name not in given)
    parts = []
    for name in names:
        one = given.get(name)
        if one is not None:
            parts.append(f"{one.place} = {shown(one.text.strip(), secret=known[name].is_secret)}")
        else:
            value = objection.about[name]
            text = f"{value:g}" if isinstance(value, float) else str(value).rstrip("/")
            parts.append(f"{name} = {text} (default)")
    return Fault(" with ".join(parts), objection.problem, objection.remedy)


def shown(text: str, *, secret: bool = False) -> str:
    """A value for a message: no secrets, no control characters, not endless."""
    if secret:
        return "(hidden)"
    text = re.sub(r"(?<=://)[^/\s?#]*@|[^/\s?#]+:[^/\s?#]*@", "***@", text)
    text = re.sub(r"([?#]).+", r"\1***", text) if "://" in text else text
    text = _printable(text)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    return text or "''"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


# --- files that settings name --------------------------------------------------------------------------------------


def _file_faults(settings: "Settings", given: Mapping[str, Given]) -> Iterator[Fault]:
    for room in ("engine", "canary"):
        access = getattr(settings, room)
        for name, check in (("api_key_file", _key_file_problem), ("ca_file", _ca_file_problem)):
            path: Path | None = getattr(access, name)
            problem = None if path is None else check(path)
            if problem is not None:
                yield _file_fault(f"{room}.{name}", given, *problem)
    yield from _web_file_faults(settings, given)
    directory, pause = settings.recorder.directory, settings.canary.pause_file
    if directory is not None and _is(directory, "file"):
        yield _file_fault("recorder.directory", given, "is a file", "give a directory; it is made when missing")
    recording = settings.recorder.file
    if recording is not None and _is(recording, "directory"):
        yield _file_fault("recorder.file", given, "is a directory", "give the path of a file, which need not exist")
    if pause is not None and _is(pause, "directory"):
        yield _file_fault("canary.pause_file", given, "is a directory", "give the path of a file, which need not exist")


def _web_file_faults(settings: "Settings", given: Mapping[str, Given]) -> Iterator[Fault]:
    web, faulty = settings.web, False
    for name, check in (
        ("tls_cert_file", _certificate_problem),
        ("tls_key_file", _private_key_problem),
        ("client_ca_file", _ca_file_problem),
        ("bearer_token_file", _tokens_problem),
        ("basic_auth_file", _users_problem),
    ):
        path: Path | None = getattr(web, name)
        problem = None if path is None else check(path)
        if problem is not None:
            faulty = faulty or name.startswith("tls")
            yield _file_fault(f"web.{name}", given, *problem)
    if web.tls_cert_file is not None and web.tls_key_file is not None and not faulty:
        pair = _pair_problem(web.tls_cert_file, web.tls_key_file)
        if pair is not None:
            yield _file_fault("web.tls_key_file", given, *pair)


def _file_fault(name: str, given: Mapping[str, Given], problem: str, remedy: str) -> Fault:
    return Fault(f"{given[name].place} = {shown(given[name].text.strip())}", problem, remedy)


def _is(path: Path, kind: str) -> bool:
    try:
        return path.is_file() if kind == "file" else path.is_dir()
    except OSError:
        return False


def _content(path: Path) -> bytes | tuple[str, str]:
    try:
        if not path.is_file():
            return ("is not a file" if path.exists() else "no such file"), "correct the path or mount the file"
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        return f"cannot be read ({_reason(error)})", "correct the path or let this user read it"
    return content if content.strip() else ("is empty", "write the content into it or remove the setting")


def _key_file_problem(path: Path) -> tuple[str, str] | None:
    from stallwatch.settings import is_header_safe

    content = _content(path)
    if isinstance(content, tuple):
        return content
    key = content.decode("ascii", "replace").strip()
    if not is_header_safe(key):
        return "holds more than a key", "write the key alone into it, in one line of ASCII"
    return None


def _ca_file_problem(path: Path) -> tuple[str, str] | None:
    import ssl

    content = _content(path)
    if isinstance(content, tuple):
        return content
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        return "holds no certificate", "give a file of certificates in PEM form"
    return None


def _certificate_problem(path: Path) -> tuple[str, str] | None:
    content = _content(path)
    if isinstance(content, tuple):
        return content
    if b"-----BEGIN CERTIFICATE-----" not in content:
        return "holds no certificate", "give a file of certificates in PEM form, ours first"
    return None


def _private_key_problem(path: Path) -> tuple[str, str] | None:
    content = _content(path)
    if isinstance(content, tuple):
        return content
    if b"PRIVATE KEY-----" not in content:
        return "holds no private key", "give a file with the private key in PEM form"
    return None


def _pair_problem(cert: Path, key: Path) -> tuple[str, str] | None:
    import ssl

    from stallwatch.web import tls

    try:
        tls.server_context(cert, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return "is not the key of the certificate in web.tls_cert_file", "give the two files of one pair"
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return f"cannot be used with web.tls_cert_file ({reason})", "give an intact pair in PEM form"
    except (OSError, ValueError) as error:
        return f"cannot be used ({_reason(error)})", "give the private key in PEM form, without a passphrase"
    return None


def _tokens_problem(path: Path) -> tuple[str, str] | None:
    from stallwatch.web.credentials import read_tokens

    return _lines_problem(path, read_tokens, "write one token a line")


def _users_problem(path: Path) -> tuple[str, str] | None:
    from stallwatch.web.credentials import read_users

    return _lines_problem(path, read_users, "write the lines that `stallwatch hash-password USER` prints")


def _lines_problem(path: Path, read_lines: Callable[[str], object], remedy: str) -> tuple[str, str] | None:
    content = _content(path)
    if isinstance(content, tuple):
        return content
    try:
        read_lines(content.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8", remedy
    except ValueError as error:
        return str(error), remedy
    return None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error)


# --- reference -----------------------------------------------------------------------------------------------------


def _default_text(info: "FieldInfo") -> str:
    extra = info.json_schema_extra
    if isinstance(extra, dict) and "default_text" in extra:
        return str(extra["default_text"])
    default = info.get_default(call_default_factory=False)
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default).rstrip("/")


def _kind(info: "FieldInfo") -> type:
    """The type of a setting, without the None of "not set" and without its constraints."""
    from typing import Annotated, get_args, get_origin

    annotation: Any = info.annotation
    options = [one for one in get_args(annotation) if one is not type(None)]
    if options and len(options) < len(get_args(annotation)):
        annotation = options[0]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) else str


def _metavar(name: str, info: "FieldInfo") -> str:
    kind = _kind(info)
    choices = _choices(info) or (("true", "false") if kind is bool else ())
    if choices:
        return "|".join(choices)
    metavars = {"HttpUrl": "URL", "Path": "PATH", "SecretStr": "KEY", "float": "NUMBER", "int": "NUMBER"}
    return metavars.get(kind.__name__, name.rpartition(".")[2].upper())


def _rooms() -> Iterator[tuple[str, str, list[tuple[Setting, "FieldInfo"]]]]:
    from stallwatch.settings import Settings

    known, infos = _known(), dict(_fields())
    for room, info in Settings.model_fields.items():
        about = (getattr(info.annotation, "__doc__", None) or "").partition("\n")[0]
        yield room, about, [(known[name], one) for name, one in infos.items() if name.startswith(f"{room}.")]


def settings_help(rooms: Sequence[str] | None = None) -> str:
    """The settings of some rooms, or of all, for a terminal of 80 columns and more."""
    lines = [
        "Each setting is a flag, a variable, or a line of a file. Flags win over",
        "variables, variables over the file, the file over the defaults.",
        "",
        "  --config FILE",
        "      YAML or TOML file with settings.",
        f"      {CONFIG_VARIABLE}",
    ]
    for room, about, members in _rooms():
        if rooms is not None and room not in rooms:
            continue
        lines += ["", f"{room}: {about}"]
        for setting, info in members:
            metavar = _metavar(setting.name, info)
            lines.append(f"  {setting.variable}={metavar}" if setting.is_secret else f"  {setting.flag} {metavar}")
            default = _default_text(info)
            text = f"{info.description} [default: {default}]" if default else str(info.description)
            lines += textwrap.wrap(
                text.replace("`", ""),
                80,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
                break_long_words=False,
            )
            if not setting.is_secret:
                lines.append(f"      {setting.variable}")
    return "\n".join(lines) + "\n"


_MARKDOWN_HEAD = """\
<!-- Generated: python -m stallwatch.configuration > docs/configuration.md -->

# Configuration

stallwatch needs none when vLLM listens on its default port beside it. Every setting can be given in three ways, and
the first of these that names it wins:

1. a flag: `stallwatch run --canary.mode persistent` or `--canary.mode=persistent`;
2. an environment variable: `STALLWATCH_CANARY__MODE=persistent`, with two underscores between group and setting;
3. a file, YAML or TOML, given by `--config FILE` or `STALLWATCH_CONFIG`:

```yaml
{example}```

Switches can also be written `--canary.enabled` and `--no-canary.enabled`. A flag that is given twice counts as last
written. A variable that is empty, and a line of the file without a value, mean "not set": a manifest or chart may leave
them blank. An empty flag is refused, because it is mostly a shell variable that was not set.

## What is refused

stallwatch does not start with settings that cannot work. It exits with status 2 and one line per fault on standard
error, all faults at once: the setting in the spelling in which it was given, its value, what is wrong, what to do.

```
{faults}```

A misspelt variable is refused like a misspelt flag: every name that begins with `STALLWATCH_` must be a setting. The
exceptions are the names that Kubernetes injects into every pod of a namespace that has a Service called `stallwatch` or
`stallwatch-...`: `STALLWATCH_SERVICE_HOST`, `STALLWATCH_SERVICE_PORT`, `STALLWATCH_SERVICE_PORT_*`, `STALLWATCH_PORT`
and `STALLWATCH_PORT_<n>_*`. They are ignored; `enableServiceLinks: false` in the pod keeps them out altogether.
What works but is probably not meant is one warning in the log at start.

## Secrets

Keys come from files: `engine.api_key_file` and `canary.api_key_file`. Where no file can be mounted,
`STALLWATCH_ENGINE__API_KEY` and `STALLWATCH_CANARY__API_KEY` are accepted with a warning, and as a line of the file
likewise. A key is never a flag, because flags show in every `ps`, and never a part of an address. Keys do not appear in
logs, messages, labels or pages. While the canary asks the same host and port as the engine, it uses the engine's key
and certificates unless it has its own; to another host the engine's key never goes.
Who may read our own pages, and TLS for them, is described in [access.md](access.md).

## When a change takes effect

Keys, tokens, passwords and certificates are read again when their files change, and a key also when vLLM answers 401.
Every other setting needs a restart.

## Settings
"""

_EXAMPLE = """\
engine:
  url: http://127.0.0.1:8000
canary:
  mode: persistent
slo:
  itl_seconds: 0.15
"""

_FAULTS_EXAMPLE: Mapping[str, str] = {
    "STALLWATCH_CANARY_MODE": "persistent",
    "STALLWATCH_SLO__TARGET": "99",
    "STALLWATCH_ENGINE__TIMEOUT_SECONDS": "0.1",
}


def reference_markdown() -> str:
    """The configuration page of the documentation, from the models."""
    faults = ""
    try:
        load([], _FAULTS_EXAMPLE)
    except BadConfiguration as refused:
        faults = "".join(f"stallwatch: {fault}\n" for fault in refused.faults)
    lines = [_MARKDOWN_HEAD.format(example=_EXAMPLE, faults=faults)]
    for room, about, members in _rooms():
        lines += [
            f"### {room}",
            "",
            about,
            "",
            "| setting, variable | default | values | meaning |",
            "|---|---|---|---|",
        ]
        for setting, info in members:
            default = _default_text(info)
            # A default that is a phrase carries its own code marks.
            is_phrase = isinstance(info.json_schema_extra, dict)
            shown = default if is_phrase else f"`{default}`" if default else ""
            lines.append(
                f"| `{setting.name}`<br>`{setting.variable}` | {shown} | {_markdown_values(setting.name, info)} "
                f"| {info.description} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown_values(name: str, info: "FieldInfo") -> str:
    metavar = _metavar(name, info)
    if "|" in metavar:
        return ", ".join(f"`{choice}`" for choice in metavar.split("|"))
    bounds = _range(info).removeprefix("to ")
    return bounds or {"URL": "URL", "PATH": "path", "KEY": "key"}.get(metavar, "text")


if __name__ == "__main__":
    sys.stdout.write(reference_markdown())
