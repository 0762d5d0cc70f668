# `make demo` and `make test` need nothing but Python >= 3.11: they make .venv and install into it, once, in the versions of
# requirements/.

PYTHON ?= python3
# The locked version; a path or an address names another build of it.
TORCH ?= torch
# The second one, beside that of requirements/triton.txt.
SECOND ?= $(shell sed -n 's/^triton==//p' requirements/triton-second.txt)
TRITONS ?= 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0
OLDEST_TORCH ?= torch
NEWEST_TORCH ?= torch==2.15.0
WORKERS ?= 2
# Of what is compiled and interpreted, `make tests` runs a quarter and `make second` another; SHARE=1/1: all.
SHARE ?= 1/4
SECOND_SHARE ?= 2/4
# Neighbours share kernels that a process compiles once: they go to one worker, and who is done takes from the other.
SHARED := -n $(WORKERS) --dist worksteal

BIN := .venv/bin
# What a user installs; and with what tests, docs and lint want.
INSTALLED := .venv/.tersekv-installed
READY := .venv/.tersekv-ready

NATIVE := src/tersekv/backends/cpu/_native.so

.PHONY: help setup demo test lint types tests second engines vllm sglang lmcache newest lock versions sweep verify sanitize wheel table docs clean

help:
	@echo "make demo    compare the cache formats on a small built-in model"
	@echo "make test    lint, types and all tests; alone: make lint, make types, make tests"
	@echo "             one test: .venv/bin/python -m pytest tests/cache/test_pages.py -k fork"
	@echo "make second  compile and interpret the kernels with a second, locked Triton"
	@echo "make engines run the tests inside real inference engines, on the CPU; alone: make vllm, sglang, lmcache"
	@echo "make newest  what breaks with the newest torch, Triton, transformers, vLLM, SGLang and LMCache that install; long"
	@echo "make lock    write requirements/ anew: the versions that all of these install"
	@echo "make sweep   compile the kernels of every pair of what they are specialised on; long"
	@echo "make versions  the same with every Triton from 3.6 on, and the CPU tests with the oldest and newest PyTorch"
	@echo "make verify  run every operation x format on this machine's device and judge the results"
	@echo "make sanitize  run the kernels for CPUs under the address, undefined and thread sanitizers"
	@echo "make wheel   build a wheel for this platform and one for all, and try each, and the sources, in an empty environment"
	@echo "make table   write tables and pictures of docs/ and benchmarks/results/README.md anew"
	@echo "make docs    build the site into build/site; a link that leads nowhere is an error"

setup: $(NATIVE) $(READY)

# Triton last: torch's CUDA build asks for one of its own, by `==`, and brings it each time.
define install
	$(BIN)/python -m pip install -c requirements/test.txt $(1)
	$(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),$(BIN)/python -m pip install --no-deps -r requirements/triton.txt)
	touch $@
endef

$(INSTALLED): pyproject.toml setup.py requirements/test.txt requirements/triton.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call install,"$(TORCH)" -e ".[plot]")

$(READY): $(INSTALLED)
	$(call install,"tersekv[test]")

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

# A Triton beside that of requirements/triton.txt, found before it on the path.
.venv/triton-%/ready: | $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) "triton==$*"
	touch $@

# What may differ between Tritons: machine code, launchers, hooks, the interpreter's arithmetic. How the attentions take
# their cases does not: `make versions` has the rest.
SECOND_TESTS ?= tests/gluon tests/triton $(addprefix --ignore tests/,gluon/test_bind_gluon.py gluon/test_hooks_gluon.py \
	triton/test_bind.py triton/test_compile_sweep.py triton/test_compile_mla_prefill.py triton/test_compile_mla_project.py) \
	-k "not test_interpreted or test_casts or test_codes or test_append or test_verify_cases"
second: .venv/triton-$(SECOND)/ready
	TERSEKV_SHARE=$(SECOND_SHARE) PYTHONPATH=$(<D) $(BIN)/python -m pytest $(SHARED) -p no:cacheprovider $(SECOND_TESTS)

engines: vllm sglang lmcache

.venv/%/ready: requirements/%.txt scripts/engine.py | $(READY)
	$(BIN)/python scripts/engine.py $* $(@D)
	touch $@

vllm: $(NATIVE) .venv/vllm/ready
	PYTHONPATH=.venv/vllm $(BIN)/python -m pytest -p no:cacheprovider tests/engines

sglang: $(NATIVE) .venv/sglang/ready
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/sglang $(BIN)/python -m pytest -p no:cacheprovider tests/engines

lmcache: $(NATIVE) .venv/lmcache/ready
	PYTHONPATH=.venv/lmcache $(BIN)/python -m pytest -p no:cacheprovider tests/engines

# The canary, by hand: releases elsewhere decide what it says. NEWEST="transformers vllm": these alone.
newest: $(NATIVE) $(READY)
	TERSEKV_SHARE=$(SHARE) $(BIN)/python scripts/newest.py $(NEWEST)

# LOCK=vllm: that file alone. PIN="torch==2.14.0 vllm==0.34.0": torch and the engines stay as they are unless named.
lock: $(READY)
	$(BIN)/python scripts/lock.py $(LOCK) $(addprefix --pin ,$(PIN))

# SWEEP="--archs 90 --ops decode --part 0.2": less. PYTHONPATH=.venv/triton-3.9.0 before it: with that Triton.
sweep: $(READY)
	$(BIN)/python scripts/compile_sweep.py $(SWEEP)

# Every Triton that the kernels are held to, the CPU suite on both ends of pyproject.toml's ranges, and native kernels compiled for NEON.
# Builds for CUDA run on a CPU too, but are 4 to 7 GB each with the libraries they depend on: name a smaller build where
# there is one, or "" for none.
versions: $(READY) $(TRITONS:%=.venv/triton-%/ready)
	set -e; for v in $(TRITONS); do \
		PYTEST_ADDOPTS="-m ''" PYTHONPATH=.venv/triton-$$v $(BIN)/python -m pytest $(SHARED) -p no:cacheprovider tests/gluon tests/triton; \
	done
	set -e; for t in $(if $(OLDEST_TORCH),"-c requirements/oldest.txt $(OLDEST_TORCH)") $(if $(NEWEST_TORCH),"$(NEWEST_TORCH)"); do \
		$(PYTHON) -m venv --clear .venv/torch; \
		.venv/torch/bin/python -m pip install --quiet $$t -e ".[test]"; \
		.venv/torch/bin/python -m pytest $(SHARED) -p no:cacheprovider tests \
			--ignore tests/gluon --ignore tests/triton; \
	done
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/zig ziglang
	PYTHONPATH=.venv/zig $(BIN)/python -m pytest -p no:cacheprovider tests/cpu/test_cpu.py -k neon

verify: $(NATIVE)
	$(BIN)/tersekv verify

sanitize: $(READY)
	$(BIN)/python scripts/sanitize.py

wheel: $(READY)
	$(BIN)/python scripts/try_wheels.py

table: $(READY)
	$(BIN)/python scripts/support_table.py --write
	$(BIN)/python scripts/reports_table.py --write
	$(BIN)/python scripts/format_tables.py --write
	$(BIN)/python scripts/performance_page.py --write
	$(BIN)/python scripts/runs_page.py --write
	$(BIN)/python scripts/cpu_page.py --write
	$(BIN)/python scripts/drawings.py --write
	$(BIN)/python scripts/troubleshooting.py --write
	$(BIN)/python scripts/families_table.py --write
	$(BIN)/python scripts/peer_table.py --write
	$(BIN)/python scripts/vllm_page.py --write
	$(BIN)/python scripts/tiers_page.py --write
	$(BIN)/python scripts/sparse_page.py --write

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
