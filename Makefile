# Each target builds its own environment when it is missing or out of date, and works offline afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check bench figures clean

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 12

# Only pip finds the CPU build that constraints.txt pins, so pip it is.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed; say which one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)   ## the rules side by side on one straggling cluster: a table and a figure
	$(BIN)/python examples/demo.py

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check      ## check, then every test
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

bench: $(READY)  ## how fast the simulator is
	$(BIN)/python bench/simulator.py

figures: $(READY) ## make the figures of docs/ again
	$(BIN)/python docs/figures.py

clean:           ## remove the environment and everything that was made
	rm -rf $(VENV) build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
