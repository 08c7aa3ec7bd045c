# Two commands for a newcomer: `make demo` and `make test`. Both make the same .venv and are fast the second time.

PYTHON ?= python3.11
BIN := .venv/bin
# Tests side by side, each on a core of its own.
JOBS ?= $(shell n=$$(nproc); echo $$(( n < 4 ? n : 4 )))
PYTEST := $(BIN)/pytest -q -n $(JOBS) --dist worksteal
SOURCES := pyproject.toml Makefile

.PHONY: demo model test test-fast nightly lint bench clean

.venv/base: $(SOURCES)
	@echo "installing into .venv (1.6 GB, a minute or two the first time) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and pinned: a bare requirement would pull several GB of CUDA where no GPU is.
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[demo]'
	touch $@

.venv/test: .venv/base
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

# At once when it is in the cache already.
model: .venv/base
	$(BIN)/pagedgen model get smollm2-135m

demo: model
	mkdir -p out
	$(BIN)/pagedgen run smollm2-135m data/chat_sample.jsonl --max-tokens 128 -o out/demo.jsonl --overwrite

# Everything, as CI runs it: linters, types, then the whole suite.
test: .venv/test model lint
	$(PYTEST) --durations=15

# Without the slowest sweeps over model families.
test-fast: .venv/test
	$(PYTEST) -m "not slow and not demo"

nightly: .venv/test model
	PAGEDGEN_PROFILE=nightly $(PYTEST) --durations=15

# Types are checked on a normal install: mypy can't follow an editable one.
lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build && $(BIN)/pip install --quiet --no-deps --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml

bench: .venv/test
	$(BIN)/python recipes/benchmarks/kernels.py

clean:
	rm -rf .venv build out *.egg-info .pytest_cache .mypy_cache .ruff_cache
