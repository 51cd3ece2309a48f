# Everything runs in .venv, made once from the system's python3; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
WORKERS ?= 2
# worksteal: neighbours share their fixtures and their imports in one process, until the other has nothing left.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal
# Threads that wait spinning make small CPU products a hundred times slower as soon as anything else runs.
export OMP_WAIT_POLICY ?= passive
export HF_HUB_OFFLINE := 1
# Two test processes on two cores: more threads in each of them would only wait for one another. Inductor's C++ without
# vectors, which are not what is tested: its first compilation of a process takes 2 s instead of 12 to 13.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=0
# Bytecode is kept, whatever the caller keeps: dozens of processes import the same files. Not for mutants, whose files may
# differ in neither size nor time.
KEEP_BYTECODE := PYTHONDONTWRITEBYTECODE=

.PHONY: help demo test test-cuda mutants check bench docs readme clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV); the first time this takes a minute or two."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --quiet --constraint constraints.txt --editable ".[test,hf,bench,dev]"
	@touch $@

demo: $(STAMP)  ## compile real model classes, show the graph before and after, the errors and the times
	$(PY) -m moe_ops.examples.quickstart

test: $(STAMP)  ## the test suite, then the kernels under the Triton CPU interpreter
	$(TEST_ENV) $(KEEP_BYTECODE) $(PYTEST) tests
	$(TEST_ENV) $(KEEP_BYTECODE) TRITON_INTERPRET=1 $(PYTEST) tests/interpreted

test-cuda: $(STAMP)  ## the tests that need a GPU
	$(PY) -m pytest -m cuda tests

mutants: $(STAMP)  ## change the code at one point after another, list what no test sees (ARGS="--count 60 meta/*")
	$(TEST_ENV) $(PY) tests/mutants.py $(ARGS)

check: $(STAMP)  ## ruff, mypy, import layers
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP)  ## time MoE layers on this machine (ARGS="--shapes ... --tokens ...")
	$(PY) -m benchmarks $(ARGS)

docs readme: $(STAMP)  ## plots and README tables from benchmarks/results/*.json
	$(PY) -m benchmarks report

clean:  ## remove the environment and the caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
