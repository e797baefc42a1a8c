# Everything runs in .venv, made on first use.  PYTHON picks the interpreter it is made from (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-fast test-vllm test-sglang lint types layers format check vllm sglang bench bars docs clean

help:  ## Show the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet -e . --group dev
	@touch $(STAMP)

demo: $(STAMP)  ## Start a pool of 4 engines and compare round-robin with cache-aware routing
	@$(BIN)/shoal demo

test: $(STAMP)  ## Everything that CI runs: lint, types, layers, and every test
	@$(MAKE) --no-print-directory lint types layers
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not e2e" --reruns 1
	$(BIN)/python -m pytest -q -m e2e --reruns 2

test-fast: $(STAMP)  ## Only the tests that start no processes
	$(BIN)/python -m pytest -q -n 2 -m "not e2e"

lint: $(STAMP)  ## Style and format
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench

format: $(STAMP)  ## Put the code in format
	$(BIN)/ruff check --fix src tests bench
	$(BIN)/ruff format src tests bench

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

layers: $(STAMP)  ## Who may import whom
	$(BIN)/lint-imports

check: lint types layers  ## The checks without the tests

vllm:  ## Install a real vLLM for CPU in .venv-vllm; make test then runs the tests that need one
	@tests/vllm/install.sh $(CURDIR)/.venv-vllm

test-vllm: $(STAMP) vllm  ## Install a real vLLM for CPU and run the tests that need one
	$(BIN)/python -m pytest -q tests/vllm

sglang:  ## Install a real SGLang on CPU in .venv-sglang, and vLLM, with which it shares torch
	@tests/sglang/install.sh $(CURDIR)/.venv-sglang $(CURDIR)/.venv-vllm

test-sglang: $(STAMP) sglang  ## Install a real SGLang on CPU and run the tests that need one
	$(BIN)/python -m pytest -q tests/sglang

bench: $(STAMP)  ## Measure this machine: latency, CPU per request, index; make bench PEERS=1: other routers beside ours
	$(BIN)/python -m $(if $(PEERS),bench.peers,bench)

bars: $(STAMP)  ## Run the bars: make bars PART=1, or make bars ID=router.cpu-small
	$(BIN)/python -m bench.bars $(if $(ID),--id $(ID)) $(if $(PART),--part $(PART))

docs: $(STAMP)  ## Write the generated pages of docs/
	$(BIN)/shoal docs plugins > docs/plugins.md

clean:  ## Remove what the verbs made
	rm -rf $(VENV) .bench .bench-peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
