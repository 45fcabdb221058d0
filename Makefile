# Every target creates or updates .venv if needed. After that, every target except fuzz works offline.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check nettools storm fuzz bench figures clean

help:            ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 12

# Use pip: other installers don't find the CPU build of torch that constraints.txt pins.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Paceline needs Python 3.11 or newer; choose one with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Eight workers: one is always slow, and each is slow now and then.
DEMO := paceline compare --workers 8 --epochs 11 --target "accuracy>=0.95" \
	--latency "80ms + exp:5ms + 5% exp:400ms; worker 7 x2" --out demo-out examples/digits.py

demo: $(READY)   ## train with stragglers under five rules and compare them (two minutes)
	@rm -rf demo-out
	@echo '$$ $(DEMO)'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(DEMO)

check: $(READY)  ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests across hosts need ip, tc and nft, and root. They are skipped where those can't be installed.
nettools: export PATH := $(PATH):/usr/sbin:/sbin
nettools:
	@[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0; \
	command -v ip >/dev/null && command -v tc >/dev/null && command -v nft >/dev/null && exit 0; \
	install="env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends iproute2 nftables"; \
	$$install >/dev/null 2>&1 || { apt-get update -qq && $$install >/dev/null; } \
		|| echo "can't install iproute2 and nftables: the tests that need them are skipped"

test: check nettools ## run the checks, then every test (about 15 minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered

storm: $(READY)  ## simulate disasters for MINUTES=10, or repeat one with SEED=123 (and FAULTS=0,2)
	$(BIN)/python tests/storm $(if $(SEED),--seed $(SEED) --story $(if $(FAULTS),--faults $(FAULTS)),--minutes $(or $(MINUTES),10))

fuzz: $(READY)   ## fuzz the code that reads bytes from a connection, for one minute
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tests/fuzz/wire_fuzz.py -max_total_time=60

bench: $(READY)  ## measure the simulator, the step time compared to DDP, and runs compared to their simulation
	$(BIN)/python bench/simulator.py
	$(BIN)/python bench/runtime.py
	$(BIN)/python bench/stragglers.py

figures: $(READY) ## redraw the figures in docs/
	$(BIN)/python docs/figures.py

clean:           ## remove .venv and all generated files
	rm -rf $(VENV) build dist demo-out lab-out runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
