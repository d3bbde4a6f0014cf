# make demo   trains a small language model without and with RoPE, draws the curves
# make test   the whole test suite
# Both make the environment .venv first, once, and again when the files that define it change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SMOKE := build/smoke
DEMO := results/demo

.PHONY: help venv demo test test-triton sanitize lint format types smoke clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make venv       the environment alone, in $(VENV) (PYTHON=... picks another Python)"
	@echo "make demo       compare linear attention without and with RoPE, into $(DEMO)"
	@echo "make test       the whole test suite"
	@echo "make test-triton   the GPU kernels on the CPU, by Triton's interpreter (installs Triton, 1 GB)"
	@echo "make sanitize   the native kernels under sanitizers (GCC, some minutes)"
	@echo "make lint       ruff: rules and format;  make format: apply them"
	@echo "make types      mypy"
	@echo "make smoke      the comparison end to end on a small generated text"
	@echo "make clean      remove caches and builds;  make distclean: $(VENV) too"

venv: $(INSTALLED)
	@echo "$(VENV) is ready: $$($(BIN)/python --version)"

# An interrupted installation leaves no stamp, so the next call goes on where it stopped.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
		2>/dev/null || { echo "linear_rope needs Python 3.10 to 3.13, and '$(PYTHON)' is not one" \
		"($$($(PYTHON) --version 2>&1 || true)); name another, as in: make $(or $(MAKECMDGOALS),venv)" \
		"PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --disable-pip-version-check \
		-c constraints.txt -e '.[enwik8,sample,performer,compression,tensorboard,dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m enwik8 compare --preset demo --out $(DEMO) --overwrite

# Two workers for two cores; tests/conftest.py gives each of them one thread.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

# Triton kernels on the CPU, by its interpreter, and flash-linear-attention's slow functions beside
# what stands for them. Triton takes 1 GB, so it is in no extra.
test-triton: $(INSTALLED)
	$(BIN)/python -m pip install --no-deps triton fla-core
	$(BIN)/python -m pytest tests/test_gpu.py tests/test_fla.py

# The native kernels under address and undefined-behavior sanitizers (GCC; some 10 minutes). The
# libraries must be there before Python starts, but not in the compiler.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1
sanitize: $(INSTALLED)
	mkdir -p build/sanitize
	printf '#!/bin/sh\nexec env -u LD_PRELOAD g++ "$$@"\n' > build/sanitize/g++
	chmod +x build/sanitize/g++
	LINEAR_ROPE_CACHE=build/sanitize LINEAR_ROPE_NATIVE_FLAGS="$(SANITIZERS)" \
	CXX=$(CURDIR)/build/sanitize/g++ ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -n0 tests/test_native.py tests/test_fused.py tests/test_decoding.py \
	    tests/test_stepping.py -k "native or step or group or sizes"

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(INSTALLED)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(INSTALLED)
	$(BIN)/python -m mypy linear_rope enwik8 benchmarks

smoke: $(INSTALLED)
	rm -rf $(SMOKE)
	mkdir -p $(SMOKE)
	$(BIN)/python -c 'import random; words = "the of and to in is was for on that with as".split(); \
		print(" ".join(random.Random(0).choices(words, k=20_000)))' > $(SMOKE)/corpus.txt
	$(BIN)/python -m enwik8 compare --corpus $(SMOKE)/corpus.txt --out $(SMOKE)/run \
		--layers 2 --dim 32 --heads 2 --length 64 --batch-size 8 --steps 40 --evaluate-every 20 --threads 1
	for file in config.json metrics.csv summary.md curves.png curves.svg; do \
		test -s $(SMOKE)/run/$$file || { echo "missing: $(SMOKE)/run/$$file" >&2; exit 1; }; done

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
