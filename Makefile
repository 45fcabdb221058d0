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

# Eight machines, one of them always slow, all of them slow now and then.
DEMO_CLUSTER := --workers 8 --latency "45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8"

demo: $(READY)   ## the rules side by side on one straggling cluster, and a plan: tables and figures
	@mkdir -p demo-out
	@echo '$$ paceline simulate $(DEMO_CLUSTER) --steps 2000'
	@$(BIN)/paceline simulate $(DEMO_CLUSTER) --steps 2000 --plot demo-out/rules.png
	@echo
	@echo '$$ paceline plan $(DEMO_CLUSTER)'
	@$(BIN)/paceline plan $(DEMO_CLUSTER) --plot demo-out/plan.png
	@echo
	@echo 'The figures are in demo-out: rules.png, plan.png'

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
	rm -rf $(VENV) build dist demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
