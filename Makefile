# `make demo` and `make test` need git, make, a C++ compiler and Python >= 3.10; the rest goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone

.PHONY: help demo test test-all test-gpu bench bench-gpu lab site weave clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[learn,dev]'
	@touch $@

demo: .venv/ready  ## train a small GPT at every stage on 2 processes; table and build/demo.png
	@$(TORCHRUN) --nproc-per-node 2 -m lessons.train

test: .venv/ready  ## what CI runs: lint, types, all tests but the slow ones
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --durations=20 -m "not slow and not gpu"

test-all: .venv/ready  ## all tests, the slow ones too
	$(BIN)/python -m pytest -q --durations=20 -m "not gpu"

lab: .venv/ready  ## JupyterLab in notebooks/
	$(BIN)/jupyter lab --notebook-dir notebooks

weave: .venv/ready  ## refresh the code, numbers and drawings inside the lessons' texts
	$(BIN)/python -m lessons.weave

test-gpu: .venv/ready  ## tests that need a GPU (and a torch built for it)
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("test-gpu: no CUDA device, so nothing was tested")'
	$(BIN)/python -m pytest -q -m gpu

bench: .venv/ready  ## step times and collectives beside the peers that are installed (20 minutes, quiet machine)
	@mkdir -p build/bench
	$(BIN)/python -m tests.bench.collectives | tee build/bench/collectives.md
	$(BIN)/python -m tests.bench.hooks | tee build/bench/hooks.md
	$(BIN)/python -W ignore -m tests.bench.step_time --no-overlap | tee build/bench/step_time.md

# Targets whose feature has not landed: they did nothing, so they fail.
bench-gpu:  ## benchmarks that need a GPU
	@echo "bench-gpu: no GPU code has landed yet, nothing was measured"; exit 1
site:  ## the documentation site
	@echo "site: the site has not landed yet, nothing was built; the lessons read well as lessons/*/lesson.md"; exit 1

clean:  ## remove what was built and installed (never your answers in work/)
	rm -rf build .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
