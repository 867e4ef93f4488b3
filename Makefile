# Each target makes .venv in the project's root first, with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test lint smoke bench clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	$(PIP) install --constraint constraints.txt torch numpy numba setuptools
	$(PIP) install --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

demo: $(STAMP) ## train a small GPT in every mode and print one table
	$(BIN)/python examples/demo.py

test: lint ## ruff, mypy, import-linter, pytest
	$(BIN)/python -m pytest

# The import names differ from the folders, so the checkers look at a copy that is laid out as it is imported.
TREE := build/tree/adaptive_eager

lint: $(STAMP) ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	@rm -rf build/tree && mkdir -p build/tree && cp -r adaptive_eager $(TREE) && cp -r kernels device_sim $(TREE)/
	MYPYPATH=build/tree $(BIN)/mypy
	cd build/tree && PYTHONPATH=. ../../$(BIN)/lint-imports ../../pyproject.toml

smoke: $(STAMP) ## the quickest tests, under a minute
	$(BIN)/python -m pytest tests/unit tests/golden

bench: $(STAMP) ## the benchmarks behind the README's figures
	$(BIN)/python -m tests.perf.record
	$(BIN)/python -m tests.perf.chains

clean: ## remove the environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
