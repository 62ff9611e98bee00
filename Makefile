# Everything installs itself into $(VENV) first; the second time that costs nothing.
#
#   make demo      train a tiny model on the CPU, end to end
#   make test      all tests but the slow ones          make test-all   the slow ones, too
#   make check     lint, format, types, import contracts
#   make bench     measure                              make clean      remove caches, not runs
#
# Torch: pip must find a CPU (or CUDA) build of torch. Where its configuration does not point to one, pass
# the address of PyTorch's package index for your platform: make demo TORCH_INDEX=<address>

PYTHON ?= python3.11
VENV ?= .venv
TORCH_VERSION := 2.13.0
TORCH_INDEX ?=
DEMO ?= configs/copy_text/rl.toml
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.tandem-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
CODE := transport orchestrator trainer inference runtime examples
LINTED := $(CODE) tests benchmarks

# Without bytecode every process compiles torch and transformers anew: imports take twice as long.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check format bench clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(INSTALLED)

$(INSTALLED): pyproject.toml examples/pyproject.toml requirements/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -qq $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	$(PIP) install -qq --constraint requirements/constraints.txt --editable '.[torch,dev]'
	$(PIP) install -qq --no-deps --editable examples
	$(BIN)/python -m compileall -q $(CODE)
	touch $@

demo: $(INSTALLED)
	$(BIN)/rl @ $(DEMO) --run.name demo-$$(date +%Y%m%d-%H%M%S)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

bench: $(INSTALLED)
	set -e; for file in $(sort $(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file; done

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find $(CODE) tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
