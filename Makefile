# `make demo` and `make test` need nothing but Python >= 3.10: they make .venv and install into it, once.

PYTHON ?= python3
# Pinned and installed in a step of its own: left to itself, pip may choose a build of several gigabytes.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
NEWEST_TRITON ?= triton
TRITONS ?= 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0
OLDEST_TORCH ?= torch==2.10.0
NEWEST_TORCH ?= torch
WORKERS ?= 2

BIN := .venv/bin
READY := .venv/.tersekv-ready

.PHONY: help setup demo test lint types tests newest versions sweep verify table docs clean

help:
	@echo "make demo    compare the cache formats on a small built-in model"
	@echo "make test    lint, types and all tests; alone: make lint, make types, make tests"
	@echo "             one test: .venv/bin/python -m pytest tests/test_pages.py -k fork"
	@echo "make newest  compile and interpret the kernels with the newest Triton that installs"
	@echo "make sweep   compile the kernels of every pair of what they are specialised on; long"
	@echo "make versions  the same with every Triton from 3.6 on, and the CPU tests with the oldest and newest PyTorch"
	@echo "make verify  run every operation x format on this machine's device and judge the results"
	@echo "make table   write tables and pictures of README.md and docs/ anew"
	@echo "make docs    build the site into build/site; a link that leads nowhere is an error"

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

# A second Triton beside the first, found before it on the path. Interpreting the attentions would take as long as the
# rest: their cases in test_verify_cases stay.
newest: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .venv/newest-triton "$(NEWEST_TRITON)"
	PYTHONPATH=.venv/newest-triton $(BIN)/python -m pytest -n $(WORKERS) -p no:cacheprovider tests/gluon tests/triton \
		-k "not test_decode_interp and not test_mla_decode_interp"

# SWEEP="--archs 90 --ops decode --part 0.2": less. PYTHONPATH=.venv/newest-triton before it: with that Triton.
sweep: $(READY)
	$(BIN)/python scripts/compile_sweep.py $(SWEEP)

# Every Triton that the kernels are held to, and the CPU suite on both ends of PyTorch. OLDEST_TORCH and NEWEST_TORCH are
# several gigabytes each with the libraries they depend on: name a smaller build where there is one, or "" for none.
versions: $(READY)
	set -e; for v in $(TRITONS); do \
		$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .venv/triton-$$v "triton==$$v"; \
		PYTHONPATH=.venv/triton-$$v $(BIN)/python -m pytest -n $(WORKERS) -p no:cacheprovider tests/gluon tests/triton; \
	done
	set -e; for t in $(OLDEST_TORCH) $(NEWEST_TORCH); do \
		$(PYTHON) -m venv --clear .venv/torch; \
		.venv/torch/bin/python -m pip install --quiet "$$t" -e ".[test]"; \
		.venv/torch/bin/python -m pytest -n $(WORKERS) -p no:cacheprovider tests \
			--ignore tests/gluon --ignore tests/triton; \
	done

verify: $(READY)
	$(BIN)/tersekv verify

table: $(READY)
	$(BIN)/python scripts/support_table.py --write
	$(BIN)/python scripts/format_tables.py --write
	$(BIN)/python scripts/performance_page.py --write
	$(BIN)/python scripts/drawings.py --write
	$(BIN)/python scripts/troubleshooting.py --write
	$(BIN)/python scripts/families_table.py --write
	$(BIN)/python scripts/peer_table.py --write

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
