# `make demo` and `make test` need nothing but Python >= 3.10: they make .venv and install into it, once.

PYTHON ?= python3
# Pinned and installed in a step of its own: left to itself, pip may choose a build of several gigabytes.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
NEWEST_TRITON ?= triton
TRITONS ?= 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0
OLDEST_TORCH ?= torch==2.10.0
NEWEST_TORCH ?= torch
VLLM ?= vllm==0.33.0
SGLANG ?= sglang==0.5.23
WORKERS ?= 2
# Of what is compiled and interpreted, `make tests` runs a quarter and `make newest` another; SHARE=1/1: all.
SHARE ?= 1/4
NEWEST_SHARE ?= 2/4
# Neighbours share kernels that a process compiles once: they go to one worker, and who is done takes from the other.
SHARED := -n $(WORKERS) --dist worksteal

BIN := .venv/bin
# What a user installs; and with what tests, docs and lint want.
INSTALLED := .venv/.tersekv-installed
READY := .venv/.tersekv-ready

NATIVE := src/tersekv/backends/cpu/_native.so

.PHONY: help setup demo test lint types tests newest engines vllm sglang versions sweep verify sanitize wheel table docs clean

help:
	@echo "make demo    compare the cache formats on a small built-in model"
	@echo "make test    lint, types and all tests; alone: make lint, make types, make tests"
	@echo "             one test: .venv/bin/python -m pytest tests/test_pages.py -k fork"
	@echo "make newest  compile and interpret the kernels with the newest Triton that installs"
	@echo "make engines run the tests inside real inference engines, on the CPU; alone: make vllm, make sglang"
	@echo "make sweep   compile the kernels of every pair of what they are specialised on; long"
	@echo "make versions  the same with every Triton from 3.6 on, and the CPU tests with the oldest and newest PyTorch"
	@echo "make verify  run every operation x format on this machine's device and judge the results"
	@echo "make sanitize  run the kernels for CPUs under the address, undefined and thread sanitizers"
	@echo "make wheel   build a wheel for this platform and one for all, and try each in an empty environment"
	@echo "make table   write tables and pictures of README.md and docs/ anew"
	@echo "make docs    build the site into build/site; a link that leads nowhere is an error"

setup: $(NATIVE) $(READY)

$(INSTALLED): pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
ifeq ($(shell uname -s)-$(shell uname -m),Linux-x86_64)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install "$(TRITON)"
endif
	$(BIN)/python -m pip install -e ".[plot]"
	touch $@

$(READY): $(INSTALLED)
	$(BIN)/python -m pip install "tersekv[test]"
	touch $@

# The installation compiles it first; without a compiler everything runs in eager PyTorch.
$(NATIVE): $(wildcard src/tersekv/backends/cpu/native/*) src/tersekv/backends/cpu/build.py | $(INSTALLED)
	-$(BIN)/python src/tersekv/backends/cpu/build.py

demo: $(NATIVE)
	$(BIN)/tersekv demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(NATIVE) $(READY)
	TERSEKV_SHARE=$(SHARE) $(BIN)/python -m pytest $(SHARED)

# A second Triton beside the first, found before it on the path. What may differ between them: machine code, launchers,
# hooks, the interpreter's arithmetic. How the attentions take their cases does not: `make versions` has the rest.
NEWEST_TESTS ?= tests/gluon tests/triton $(addprefix --ignore tests/,gluon/test_bind_gluon.py gluon/test_hooks_gluon.py \
	triton/test_bind.py triton/test_compile_sweep.py triton/test_compile_mla_prefill.py triton/test_compile_mla_project.py) \
	-k "not test_interpreted or test_casts or test_codes or test_append or test_verify_cases"
newest: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .venv/newest-triton "$(NEWEST_TRITON)"
	TERSEKV_SHARE=$(NEWEST_SHARE) PYTHONPATH=.venv/newest-triton \
		$(BIN)/python -m pytest $(SHARED) -p no:cacheprovider $(NEWEST_TESTS)

engines: vllm sglang

# vLLM has no CPU build on the index. Of its CUDA build the Python files are enough, 60 of 810 MB: the tests bring the few
# operators that an engine calls on a CPU. It takes the torch and transformers that are here.
.venv/vllm/ready: tests/engines/vllm.txt | $(READY)
	rm -rf .venv/vllm .venv/vllm-wheel
	$(BIN)/python -m pip download --quiet --no-deps --dest .venv/vllm-wheel "$(VLLM)"
	$(BIN)/python -c "import glob, zipfile; z = zipfile.ZipFile(*glob.glob('.venv/vllm-wheel/*.whl')); \
		z.extractall('.venv/vllm', [n for n in z.namelist() if n.endswith(('.py', '.json', 'METADATA'))])"
	rm -rf .venv/vllm-wheel
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target .venv/vllm -r tests/engines/vllm.txt
	touch $@

vllm: $(NATIVE) .venv/vllm/ready
	PYTHONPATH=.venv/vllm $(BIN)/python -m pytest -p no:cacheprovider tests/engines

# SGLang likewise, with the transformers that it is pinned to and the torch that is here; kernels for GPUs stay out.
.venv/sglang/ready: tests/engines/sglang.txt | $(READY)
	rm -rf .venv/sglang .venv/sglang-wheel
	$(BIN)/python -m pip download --quiet --no-deps --dest .venv/sglang-wheel "$(SGLANG)"
	$(BIN)/python -c "import glob, zipfile; z = zipfile.ZipFile(*glob.glob('.venv/sglang-wheel/*.whl')); \
		z.extractall('.venv/sglang', [n for n in z.namelist() if not n.endswith('.so')])"
	rm -rf .venv/sglang-wheel
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target .venv/sglang -r tests/engines/sglang.txt
	touch $@

sglang: $(NATIVE) .venv/sglang/ready
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/sglang $(BIN)/python -m pytest -p no:cacheprovider tests/engines

# SWEEP="--archs 90 --ops decode --part 0.2": less. PYTHONPATH=.venv/newest-triton before it: with that Triton.
sweep: $(READY)
	$(BIN)/python scripts/compile_sweep.py $(SWEEP)

# Every Triton that the kernels are held to, the CPU suite on both ends of PyTorch, and native kernels compiled for NEON.
# Builds for CUDA run on a CPU too, but are 4 to 7 GB each with the libraries they depend on: name a smaller build where
# there is one, or "" for none.
versions: $(READY)
	set -e; for v in $(TRITONS); do \
		$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .venv/triton-$$v "triton==$$v"; \
		PYTEST_ADDOPTS="-m ''" PYTHONPATH=.venv/triton-$$v $(BIN)/python -m pytest $(SHARED) -p no:cacheprovider tests/gluon tests/triton; \
	done
	set -e; for t in $(OLDEST_TORCH) $(NEWEST_TORCH); do \
		$(PYTHON) -m venv --clear .venv/torch; \
		.venv/torch/bin/python -m pip install --quiet "$$t" -e ".[test]"; \
		.venv/torch/bin/python -m pytest $(SHARED) -p no:cacheprovider tests \
			--ignore tests/gluon --ignore tests/triton; \
	done
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/zig ziglang
	PYTHONPATH=.venv/zig $(BIN)/python -m pytest -p no:cacheprovider tests/test_cpu.py -k neon

verify: $(NATIVE)
	$(BIN)/tersekv verify

sanitize: $(READY)
	$(BIN)/python scripts/sanitize.py

wheel: $(READY)
	$(BIN)/python scripts/try_wheels.py

table: $(READY)
	$(BIN)/python scripts/support_table.py --write
	$(BIN)/python scripts/format_tables.py --write
	$(BIN)/python scripts/performance_page.py --write
	$(BIN)/python scripts/runs_page.py --write
	$(BIN)/python scripts/cpu_page.py --write
	$(BIN)/python scripts/drawings.py --write
	$(BIN)/python scripts/troubleshooting.py --write
	$(BIN)/python scripts/families_table.py --write
	$(BIN)/python scripts/peer_table.py --write
	$(BIN)/python scripts/vllm_page.py --write

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
