# Each target builds its own environment when it is missing or out of date, and works offline afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check fuzz bench figures clean

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 12

# Only pip finds the CPU build that constraints.txt pins, so pip it is.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed; say which one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Eight workers, one of them always slow, all of them slow now and then.
DEMO := paceline compare --workers 8 --epochs 11 --target "accuracy>=0.95" \
	--slow "80ms + exp:5ms + 5% exp:400ms; worker 7 x2" --out demo-out examples/digits.py

demo: $(READY)   ## train under five rules on straggling workers: a table, figures, a report
	@rm -rf demo-out
	@echo '$$ $(DEMO)'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(DEMO)

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check      ## check, then every test
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered

fuzz: $(READY)   ## a minute of a fuzzer's bytes at everything that reads what a peer sends
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tests/fuzz/wire_fuzz.py -max_total_time=60

bench: $(READY)  ## how fast: the simulator; a step beside DDP; runs beside the limit of their schedule
	$(BIN)/python bench/simulator.py
	$(BIN)/python bench/runtime.py
	$(BIN)/python bench/stragglers.py

figures: $(READY) ## make the figures of docs/ again
	$(BIN)/python docs/figures.py

clean:           ## remove the environment and everything that was made
	rm -rf $(VENV) build dist demo-out lab-out runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
