# `make demo` and `make test` need git, make, a C++ compiler and Python >= 3.10; the rest goes into .venv.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all test-gpu test-hf test-lightning test-ray test-matrix bench bench-compare bench-gpu gpu-day gpu-rehearsal gpu-page \
	lab site weave browser clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv/ready: pyproject.toml constraints.txt
	@echo "installing torch and the tools into .venv: a few minutes"
	@$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[learn,site,dev]'  # compiles csrc/ for that torch
	@touch $@

demo: .venv/ready  ## train a small GPT at every stage on 2 processes; table and build/demo.png
	@$(BIN)/python -m lessons demo

PYTEST := $(BIN)/python -m pytest -q --durations=20
# Processes beside each other take files from one queue (tests/suite.py). Each line begins with the process's number.
WHICH = not slow and not gpu and not hf and not lightning and not ray
SUITE = command -v chromium > /dev/null || export ZERO_FULL_NO_BROWSER=1; \
	$(BIN)/python -m tests.suite -q --durations=20 -m "$(WHICH)" tests
test: .venv/ready browser  ## what CI runs: lint, types, all tests but the slow ones (15 minutes on two cores)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(SUITE)

test-all: WHICH = not gpu and not hf and not lightning and not ray
test-all: .venv/ready browser  ## all tests, the slow ones too
	@$(SUITE)

lab: .venv/ready  ## JupyterLab, opened at your copies of the notebooks in work/notebooks
	@$(BIN)/python -m lessons notebook > /dev/null
	$(BIN)/jupyter lab --notebook-dir . --LabApp.default_url=/lab/tree/work/notebooks

weave: .venv/ready  ## refresh the code, numbers and drawings inside the lessons' texts, and the picture that moves
	$(BIN)/python -m lessons.weave
	$(BIN)/python site/hooks/four_stages_gif.py

test-gpu: export ZERO_FULL_KERNELS = all
test-gpu: .venv/ready  ## tests that need a GPU (and a torch built for it)
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("test-gpu: no CUDA device, so nothing was tested")'
	$(BIN)/python -m pytest -q -m gpu

test-hf: .venv/ready  ## Hugging Face's models and libraries at every stage (installs them; 10 minutes)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf]'
	$(PYTEST) -m hf tests/hf

test-lightning: .venv/ready  ## Lightning's Trainer and Fabric at every stage beside DDP (installs it; 5 minutes)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lightning]'
	$(PYTEST) tests/lightning

test-ray: .venv/ready  ## Ray Train, with a node that is lost (installs it; 5 minutes)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ray]'
	$(PYTEST) tests/ray_train

# Where a PYTHON is named, that one runs a day on GPUs and nothing is installed; else .venv's, where there is one.
GIVEN := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
gpu-day: DAY := $(or $(GIVEN),$(wildcard $(BIN)/python),$(PYTHON))
gpu-day:  ## all that needs a GPU, in parts that go on where they ended (REHEARSE=1: on the CPU; MINUTES=9.5; OUT=build)
	@$(DAY) -m tests.gpu.day $(if $(REHEARSE),--rehearse) $(if $(MINUTES),--minutes $(MINUTES))

gpu-rehearsal: DAY := $(or $(GIVEN),$(wildcard $(BIN)/python),$(PYTHON))
gpu-rehearsal:  ## a day on GPUs, on the CPU: in calls of 9.5 minutes, of which two are killed
	@$(DAY) -m tests.gpu.day.rehearsal

gpu-page: .venv/ready  ## take the results of gpu-day into the site's page on GPUs (ARCHIVE=gpu-day.zip)
	$(BIN)/python -m tests.gpu.day.page $(if $(ARCHIVE),--archive $(ARCHIVE),--folder build/gpu-day)

# The oldest torch that is supported on Python 3.12, if there is one; or the pair that TORCH and PYTHON name. Each pair
# has an environment of its own: a wheel of torch brings gigabytes of CUDA, and the tests then run on the CPU.
TORCH := $(shell sed -n 's/^  "torch>=\(.*\)",.*/\1/p' pyproject.toml)
MATRIX_PYTHON := $(or $(GIVEN),$(shell python3.12 -c 'import sys; print(sys.executable)' 2> /dev/null),python3)
MATRIX := build/matrix/torch-$(TORCH)-$(notdir $(MATRIX_PYTHON))
$(MATRIX)/ready: pyproject.toml constraints.txt
	@$(MATRIX_PYTHON) -m venv $(MATRIX)
	grep -v '^torch==' constraints.txt > $(MATRIX)/constraints.txt
	$(MATRIX)/bin/python -m pip install --quiet -c $(MATRIX)/constraints.txt 'torch==$(TORCH).*'
	$(MATRIX)/bin/python -m pip install --quiet -c $(MATRIX)/constraints.txt -e '.[learn,site,dev]'
	@touch $@

test-matrix: BIN := $(MATRIX)/bin
test-matrix: $(MATRIX)/ready  ## the tests on the oldest torch, and Python 3.12; or TORCH=2.15.0 PYTHON=python3.13 (6 GB each)
	@export ZERO_FULL_NO_BROWSER=1; $(SUITE)

bench: .venv/ready  ## kernels, step times, collectives, checkpoints, offload, optimizers, messages, real models beside peers that are installed (90 minutes, quiet machine)
	@mkdir -p build/bench
	$(BIN)/python -m tests.bench.kernels | tee build/bench/kernels.md
	$(BIN)/python -m tests.bench.files | tee build/bench/files.md
	$(BIN)/python -m tests.bench.checkpoint | tee build/bench/checkpoint.md
	$(BIN)/python -W ignore -m tests.bench.recovery --rounds 2 | tee build/bench/recovery.md
	$(BIN)/python -m tests.bench.collectives | tee build/bench/collectives.md
	$(BIN)/python -m tests.bench.hooks | tee build/bench/hooks.md
	$(BIN)/python -m tests.bench.units | tee build/bench/units.md
	$(BIN)/python -W ignore -m tests.bench.many_tensors | tee build/bench/many_tensors.md
	$(BIN)/python -m tests.bench.facade | tee build/bench/facade.md
	$(BIN)/python -m tests.bench.commands | tee build/bench/commands.md
	$(BIN)/python -m tests.bench.engines | tee build/bench/engines.md
	$(BIN)/python -m tests.bench.compression bytes | tee build/bench/compression_bytes.md
	$(BIN)/python -m tests.bench.compression link | tee build/bench/compression_link.md
	$(BIN)/python -W ignore -m tests.bench.wire | tee build/bench/wire.md
	$(BIN)/python -m tests.bench.optimizers | tee build/bench/optimizers.md
	$(BIN)/python -m tests.bench.scales | tee build/bench/scales.md
	@rm -f build/bench/real_models.json  # measurements are added to it
	$(BIN)/python -m tests.bench.real_models --ranks 2 | tee build/bench/real_models.md
	$(BIN)/python -W ignore -m tests.bench.real_models_peak | tee build/bench/real_models_peak.md
	$(BIN)/python -W ignore -m tests.bench.step_time | tee build/bench/step_time.md
	$(BIN)/python -W ignore -m tests.bench.forecast | tee build/bench/forecast.md
	$(BIN)/python -W ignore -m tests.bench.offload --topics peers | tee build/bench/offload_peers.md
	$(BIN)/python -W ignore -m tests.bench.offload --topics disk | tee build/bench/offload_disk.md
	$(BIN)/python -W ignore -m tests.bench.offload --topics overlap | tee build/bench/offload_overlap.md

bench-compare: .venv/ready  ## a training step of the present files beside BASE=<commit>'s; fails if a row is 5 % slower (quiet machine)
	@test -n "$(BASE)" || { echo "name the commit to compare with: make bench-compare BASE=main"; exit 2; }
	$(BIN)/python -m tests.bench.compare $(BASE)
	$(BIN)/python -m tests.bench.compare $(BASE) --wire

bench-gpu: export ZERO_FULL_KERNELS = all
bench-gpu: .venv/ready  ## the GPU's kernels beside its copy bandwidth; what state on the host costs there
	@mkdir -p build/bench
	$(BIN)/python -m tests.bench.kernels_gpu | tee build/bench/kernels_gpu.md
	$(BIN)/python -W ignore -m tests.bench.offload --device cuda | tee build/bench/offload_gpu.md

site: .venv/ready  ## the documentation site, in build/site (open index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f site/mkdocs.yml

# Pages are tested in Debian's chromium. CI gets it here; whoever has none is told that those tests were skipped.
browser:
	@command -v chromium > /dev/null || [ -z "$$CI" ] || [ "$$(id -u)" != 0 ] || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; }
	@command -v chromium > /dev/null || echo "no chromium, so no page is tested in a browser; on Debian: apt-get install chromium"

clean:  ## remove what was built and installed (never your answers in work/)
	rm -rf build .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
