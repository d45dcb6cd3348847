# Everything installs itself: `make demo` and `make test` need Python 3.11+ and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A tier ends with its ten slowest tests, its name and its time. The workers are as many as the cores it is made for.
tier = @began=$$(date +%s); $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder \
	--durations=10 $(1); status=$$?; echo "$@ took $$(($$(date +%s) - began)) s"; exit $$status

.PHONY: demo test test-long hunt gpu-check bench lint types contracts kernels check clean

demo: $(READY)
	$(BIN)/python tools/demo.py

test: $(READY)
	$(call tier,-m "not slow and not gpu")

test-long: $(READY)
	$(call tier,-m "not gpu" --timeout 900)

# Fleets on one thread from fresh seeds, until one breaks a property or SEEDS are done.
SEEDS ?= 100000
START ?= $(shell date +%s)00000
hunt: $(READY)
	$(BIN)/python tools/simulate.py --seeds $(SEEDS) --start $(START)

# On a machine with a GPU: the tests that need one, and a report of device, driver and results in build/gpu-check.md.
gpu-check: $(READY)
	$(BIN)/python tools/gpu_check.py

bench: $(READY)
	$(BIN)/python -m bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

# Compiles every kernel for every chip and compares with docs/kernels.md; `python tools/kernel_report.py` writes it anew.
kernels: $(READY)
	$(BIN)/python tools/kernel_report.py --check

check: lint types contracts kernels test

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whalez needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) checkpoints build *.egg-info
