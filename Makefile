# Targets make their own environment in .venv, except those for a GPU; it is renewed only when the files named after `$(STAMP):` change.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo test test-gpu soak-gpu check bench bench-gpu fmt clean

help:
	@echo "make demo      write a small model, generate with its n-gram table outside the model, compare with the ordinary model"
	@echo "make test      run the tests (no GPU needed)"
	@echo "make test-gpu  run the tests that need an NVIDIA GPU, with the packages that PYTHON has"
	@echo "make soak-gpu  the same, 100,000 random steps"
	@echo "make check     linter, formatter, type checker, import rules"
	@echo "make bench     run the benchmarks; results go to benchmarks/results/"
	@echo "make bench-gpu run the GPU benchmarks, with the packages that PYTHON has (about 15 minutes, 128 GB of memory)"
	@echo "make fmt       format and mend what the linter can mend"
	@echo "make clean     remove the environment and every cache"

demo: $(STAMP)
	$(BIN)/ple-offload demo

test: $(STAMP)
	$(BIN)/python -m pytest

# On a machine with a GPU and its own PyTorch: PYTHON is used as it is, with what it has installed.
test-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -W ignore -m pytest -m gpu tests/gpu
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -W ignore -m pytest tests/kernels/test_kernels.py

soak-gpu:
	PLE_SOAK_STEPS=100000 PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -W ignore -m pytest -m gpu tests/gpu/test_soak.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

bench-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) benchmarks/gpu/run.py lookup step gather start cost concurrency --out benchmarks/results

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV); with PyTorch that takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
