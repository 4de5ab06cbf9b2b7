# Everything a visitor needs: `make study` for a report, `make test` for the checks.
# VENV, PYTHON and ARGS can be given on the command line.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: help study test test-gpu lint clean

help:
	@echo "make study     run the quick study on the best device here and write reports/quick/README.md"
	@echo "make test      ruff, mypy and pytest, on the CPU"
	@echo "make test-gpu  the same suite on a GPU, with the current Python, installing nothing"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

study: $(STAMP)
	$(BIN)/splitkv run reports/quick --fresh --require ours $(ARGS)
	$(BIN)/splitkv render reports/quick

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m 'not slow' -n auto $(ARGS)

test-gpu:
	SPLITKV_REQUIRE_GPU=1 $(PYTHON) -m pytest $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
