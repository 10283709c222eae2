import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "stallwatch"

ROOMS = {
    "observations": set(),
    "settings": set(),
    "scheduling": {"observations"},
    "health": {"observations", "scheduling"},
    "sources": {"observations", "scheduling", "settings"},
    "analysis": {"observations"},
    "catalogue": {"analysis"},
    "exporter": {"observations", "settings", "analysis", "catalogue", "health"},
    "recorder": {"observations", "settings", "analysis", "health"},
    "drawing": set(),
    "web": {"observations", "settings", "analysis", "catalogue", "health", "exporter", "drawing"},
    "experiment": {"observations", "settings", "scheduling", "sources", "analysis", "drawing"},
    "simulator": set(),
    "vllm_plugin": set(),
}
"""What each room may import of stallwatch beside itself and the version; rooms not listed may import anything."""

IO = {"aiohttp", "asyncio", "socket", "ssl", "os", "pathlib", "subprocess", "threading", "pynvml", "structlog", "time"}
"""What analysis may not touch: the outside world, other tasks, and the clock."""


def imports(path: Path) -> set[str]:
    """Absolute module names that a file imports, those inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" if module == "stallwatch" else module for alias in node.names}
    return found


def room_of(path: Path) -> str:
    """The room that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    """A room imports only the rooms before it in the flow."""
    room = room_of(path)
    if room not in ROOMS:
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("stallwatch.")}

    assert used - {room, "__version__"} <= ROOMS[room]


@pytest.mark.parametrize("path", sorted((PACKAGE / "analysis").rglob("*.py")), ids=lambda path: path.name)
def test_analysis_touches_neither_the_world_nor_a_clock(path: Path) -> None:
    """Time comes with observations, so that a recording replays bit for bit."""
    assert not {name.split(".")[0] for name in imports(path)} & IO


JUDGING = ("plan", "statistics", "record", "confirm", "measure", "conclude", "tradeoff", "compare", "markdown")


@pytest.mark.parametrize("name", JUDGING)
def test_an_experiment_is_judged_without_the_world(name: str) -> None:
    """What is concluded follows from what was taken down, whenever that is judged again."""
    path = PACKAGE / "experiment" / f"{name}.py"

    assert not {module.split(".")[0] for module in imports(path)} & IO


def test_every_room_is_known() -> None:
    """A new room says where it stands in the flow, or is one of the few that wire things together."""
    assert {room_of(path) for path in FILES} - set(ROOMS) <= {
        "__init__",
        "__main__",
        "app",
        "cli",
        "demo",
        "commands",
        "configuration",
        "logs",
    }


def test_nothing_patches() -> None:
    """Fakes stand at three borders only: the clock, the socket of vLLM and the NVML library."""
    word = "mock" + ".patch"

    assert not [path for path in PACKAGE.parent.glob("tests/**/*.py") if word in path.read_text()]
