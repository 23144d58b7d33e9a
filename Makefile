# `make demo` and `make test` are all a fresh machine needs: each makes .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

# make demo MODEL=/path/to/model METHOD=a_shape
MODEL ?=
METHOD ?=

# Tests at a time; those that start servers run alone.
JOBS ?= 2

.PHONY: setup demo test lint compile-matrix matrix shapes wheel clean
.DELETE_ON_ERROR:

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml deploy/install.py
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python deploy/install.py
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/sparse-prefill demo $(if $(MODEL),--model '$(MODEL)') $(if $(METHOD),--method '$(METHOD)')

test: $(INSTALLED)
	@$(BIN)/pytest -m 'not server' -n $(JOBS) --dist worksteal
	@$(BIN)/pytest -m server --durations=12 --durations-min=10

lint: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# What each release of Triton makes of the Hopper kernel; no GPU needed, about ten minutes.
compile-matrix: $(INSTALLED)
	@$(BIN)/python -m benchmarks.compile_matrix 3.6.0 3.7.1 3.8.0 3.9.0 --out docs/results/compile_matrix.json

# Servers of several releases of vLLM, on a CPU: an environment of a good GB for each, half an hour; and the newest's sources.
matrix: $(INSTALLED)
	@$(BIN)/python -m benchmarks.vllm_matrix 0.26.0 0.28.0 0.30.0 0.32.0 \
		--out docs/results/matrix.json

# Small models of other shapes than Llama's; `make test` runs some of them.
shapes: $(INSTALLED)
	@SHAPES=all $(BIN)/pytest tests/server/test_shapes.py

wheel: $(INSTALLED)
	@$(BIN)/python -m pip wheel --disable-pip-version-check -qq --no-deps -w dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
