# Two commands do all the set-up: `make demo` and `make test`. Everything else is a variation of them.
.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTING := $(VENV)/.testing
PYTEST_ARGS ?=

.PHONY: help demo test test-vllm test-container test-long check bench lock docs tools clean

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

# Programs that judge manifests, charts and the image's recipe: 150 MB, which the demo does without.
$(TESTING): $(READY) requirements/deploy.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/deploy.txt
	@touch $@

demo: $(READY) ## a simulated vLLM, stallwatch beside it, and where to look (Ctrl-C ends it)
	$(BIN)/stallwatch demo $(DEMO_ARGS)

tools: $(READY) # programs that the tests run: installed when we may, named when not
	@$(BIN)/python tests/tools.py

test: $(TESTING) tools check ## all tests that need no real vLLM and no containers
	$(BIN)/pytest -n auto --dist loadgroup -m 'not vllm and not container and not long and not alone' $(PYTEST_ARGS)
	$(BIN)/pytest -m 'alone and not vllm and not container and not long' $(PYTEST_ARGS)

test-vllm: $(TESTING) tools ## against a real vLLM on the CPU (builds its environment once: 4 GB)
	$(PYTHON) tests/vllm/environment.py
	$(BIN)/pytest -m 'vllm and not long' $(PYTEST_ARGS)

test-container: $(TESTING) ## builds the image and runs it under a pod's limits (makes a base image once: 200 MB)
	$(BIN)/python tests/container/environment.py
	$(BIN)/pytest -m 'container and not long' $(PYTEST_ARGS)

test-long: $(TESTING) tools ## sweeps, soaks and full matrices
	$(PYTHON) tests/vllm/environment.py
	$(BIN)/pytest -m long $(PYTEST_ARGS)

check: $(TESTING) ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## measures for 8 minutes, prints figures with their spread (BENCH_ARGS=--update: into the README too)
	$(BIN)/python -m tests.bench $(BENCH_ARGS)

lock: $(READY) ## pins the requirements anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--output-file requirements/runtime.txt pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--group dev --output-file requirements/dev.txt pyproject.toml
	for group in build deploy; do \
		$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
			--constraint requirements/dev.txt --group pyproject.toml:$$group --output-file requirements/$$group.txt || exit 1; \
	done

docs: $(READY) ## writes what is generated: alert rules, dashboards, the metric and the configuration reference
	$(BIN)/python -m deploy.build
	$(BIN)/python -m tests.docs --update

clean: ## removes the environment and what tests left
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .out
