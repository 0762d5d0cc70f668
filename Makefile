# `make demo` and `make test` need nothing but Python >= 3.10: they make .venv and install into it, once.

PYTHON ?= python3
# Pinned and installed in a step of its own: left to itself, pip may choose a build of several gigabytes.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
WORKERS ?= 2

BIN := .venv/bin
READY := .venv/.tersekv-ready

.PHONY: help setup demo test lint types tests verify table clean

help:
	@echo "make demo    compare the cache formats on a small built-in model"
	@echo "make test    lint, types and all tests"
	@echo "make verify  run every operation x format on this machine's device and judge the results"
	@echo "make table   write the support tables of README.md and docs/formats.md anew"

setup: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
ifeq ($(shell uname -s)-$(shell uname -m),Linux-x86_64)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install "$(TRITON)"
endif
	$(BIN)/python -m pip install -e ".[test]"
	touch $(READY)

demo: $(READY)
	$(BIN)/tersekv demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

verify: $(READY)
	$(BIN)/tersekv verify

table: $(READY)
	$(BIN)/python scripts/support_table.py --write

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
