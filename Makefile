# Everything a visitor needs: `make study` for a report, `make test` for the checks.
# VENV, PYTHON and ARGS can be given on the command line.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: help study render html test test-html test-gpu lint clean

help:
	@echo "make study     run the quick study on the best device here and write reports/quick/README.md"
	@echo "make render    rebuild every committed report from its records, byte for byte"
	@echo "make html      the same, and each report as one page: reports/*/report.html"
	@echo "make test      ruff, mypy and pytest, on the CPU"
	@echo "make test-html the pages in a headless browser: needs Debian's chromium and chromium-driver"
	@echo "make test-gpu  the same suite on a GPU, with the current Python, installing nothing"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

study: $(STAMP)
	$(BIN)/splitkv run reports/quick --fresh --require ours $(ARGS)
	$(BIN)/splitkv render reports/quick

# What is committed; the quick study's own report is not.
REPORTS := $(filter-out reports/quick,$(patsubst %/README.md,%,$(wildcard reports/*/README.md)))

render: $(STAMP)
	@for report in $(REPORTS); do $(BIN)/splitkv render $$report $(ARGS) || exit 1; done

html: $(STAMP)
	@for report in $(REPORTS); do $(BIN)/splitkv render --html $$report $(ARGS) || exit 1; done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Workers of pytest fill the cores; threads of torch under them would only push one another off. A group is what
# shares a compiled kernel or an expensive fixture.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
GPU_PYTEST := OMP_NUM_THREADS=1 SPLITKV_REQUIRE_GPU=1 $(PYTHON) -m pytest

test: lint
	$(PYTEST) -m 'not slow and not browser' -n auto --dist loadgroup $(ARGS)

test-html: $(STAMP)
	$(PYTEST) -m browser $(ARGS)

# xdist if it is here; then, one after the other, the tests that measure.
test-gpu:
	$(GPU_PYTEST) -m 'not alone and not browser and not pinned' $$($(PYTHON) -c 'import xdist; print("-n 8 --dist loadgroup")' 2>/dev/null) $(ARGS)
	$(GPU_PYTEST) -m alone $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
