# `make demo` and `make test` are all a fresh machine needs: each makes .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

# Processes that run tests. Each takes whole files, servers first: while a server starts or answers, others compute.
JOBS ?= 2
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Where it is set, each of pytest's processes rewrites all tests anew, which takes ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all gpu lint matrix wheel clean
.DELETE_ON_ERROR:

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml deploy/install.py
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python deploy/install.py
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/sparse-prefill demo

# What to run on every change: three minutes on two cores. It starts stock vLLM and this backend, once.
test: $(INSTALLED)
	@$(BIN)/pytest -m 'not full' $(SIDE_BY_SIDE)

# All there is, as CI runs it: twenty minutes on two cores.
test-all: $(INSTALLED)
	@$(BIN)/pytest $(SIDE_BY_SIDE) --durations=15

# The tests that need a card.
gpu: $(INSTALLED)
	@$(BIN)/pytest -m gpu -n $(JOBS) --dist loadgroup

lint: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# Servers of several releases of vLLM, on a CPU: an environment of a good GB for each, half an hour.
matrix: $(INSTALLED)
	@$(BIN)/python -m benchmarks.vllm_matrix 0.30.0 0.31.0 0.32.0 \
		--out docs/results/compatibility.jsonl

wheel: $(INSTALLED)
	@$(BIN)/python -m pip wheel --disable-pip-version-check -qq --no-deps -w dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
