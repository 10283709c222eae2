"""Fixtures of the tests that need the real vLLM. They never build: a build belongs in the open, before the tests."""

from collections.abc import Iterator

import pytest

from tests.vllm.environment import Environment, default_home, find
from tests.vllm.server import VllmServer


@pytest.fixture(scope="session")
def vllm_environment() -> Environment:
    """The environment; a test that needs it fails, with the command to run, when it is not there."""
    environment = find()
    if environment is None:
        pytest.fail(f"no whole vLLM environment in {default_home()}; run: python3 tests/vllm/environment.py")
    return environment


@pytest.fixture(scope="module")
def vllm_server(vllm_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A healthy server with the tiny model and the recipe's flags, shared by the tests of one module."""
    with VllmServer(vllm_environment, tmp_path_factory.mktemp("vllm")) as server:
        yield server
