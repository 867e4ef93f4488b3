# Each target makes .venv in the project's root first, with the pinned versions of constraints.txt.
PYTHON ?= python3
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The import names differ from the folders, so the checkers look at a copy that is laid out as it is imported.
TREE := build/tree

.DEFAULT_GOAL := help
.PHONY: help demo test programs lint smoke bench clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name another one: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt setuptools
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@touch $(STAMP)

demo: $(STAMP) ## train a small GPT in every mode and print one table
	$(BIN)/python examples/demo.py

test: lint ## ruff, mypy, import-linter, pytest, conformance
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --pyargs adaptive_eager.testing.conformance --device=neuron --programs=300

programs: $(STAMP) ## over 20,000 generated programs in every mode, about an hour
	$(BIN)/python -m pytest --pyargs adaptive_eager.testing.conformance.test_programs --device=neuron --programs=7000 --hypothesis-seed=$(SEED)

lint: $(STAMP) ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	@rm -rf $(TREE) && mkdir -p $(TREE)
	@cp -R adaptive_eager $(TREE)/ && cp -R kernels device_sim $(TREE)/adaptive_eager/
	MYPYPATH=$(TREE) $(BIN)/mypy
	cd $(TREE) && PYTHONPATH=. ../../$(BIN)/lint-imports ../../pyproject.toml

smoke: $(STAMP) ## the quickest tests, under a minute
	$(BIN)/python -m pytest tests/unit tests/golden

bench: $(STAMP) ## the benchmarks behind the README's figures
	$(BIN)/python -m tests.perf.record
	$(BIN)/python -m tests.perf.chains

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
