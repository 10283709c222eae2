# Two commands do all the set-up: `make demo` and `make test`. Everything else is a variation of them.
.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_ARGS ?=

.PHONY: help demo test test-vllm test-long check bench lock docs tools clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -e 's/:.*## /\t/' | expand -t 12

$(READY): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; '$(PYTHON)' is older. Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "Python's venv module is missing. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## a simulated vLLM, stallwatch beside it, and where to look (Ctrl-C ends it)
	$(BIN)/stallwatch demo $(DEMO_ARGS)

tools: $(READY) # programs that the tests run: installed when we may, named when not
	@$(BIN)/python tests/tools.py

test: $(READY) tools check ## all tests that need no real vLLM
	$(BIN)/pytest -m 'not vllm and not long' $(PYTEST_ARGS)

test-vllm: $(READY) tools ## against a real vLLM on the CPU (builds its environment once: 4 GB)
	$(PYTHON) tests/vllm/environment.py
	$(BIN)/pytest -m 'vllm and not long' $(PYTEST_ARGS)

test-long: $(READY) tools ## sweeps, soaks and full matrices
	$(PYTHON) tests/vllm/environment.py
	$(BIN)/pytest -m long $(PYTEST_ARGS)

check: $(READY) ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## measures, prints figures with their spread
	$(BIN)/python -m tests.bench $(BENCH_ARGS)

lock: $(READY) ## pins the requirements anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--output-file requirements/runtime.txt pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--group dev --output-file requirements/dev.txt pyproject.toml

docs: $(READY) ## writes what is generated: the metric reference and the configuration reference
	$(BIN)/python -m tests.docs --update

clean: ## removes the environment and what tests left
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .out
