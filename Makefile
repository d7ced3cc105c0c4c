# make demo   sets up, then goes from raw data to served personal models
# make test   sets up, then runs every gate
# make test-all   sets up, then runs every gate with the tests that are too long for every change
# make bench  sets up, then measures seconds per round; DEVICE=gpu on a GPU, after make setup GPU=1
# make test-flink  sets up, then runs the Beam jobs on a real Flink cluster on this machine
# make table-user-level  sets up, then compares methods of user-level DP on real writers
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
CUDA := $(VENV)/.cuda
PACKAGES := $(VENV)/.packages
# What the product needs, which is in the wheel; and what development needs besides.
LOCKS := tff_pdp/requirements.txt requirements-dev.txt
DATA ?=
DEVICE ?= cpu
# GPU=1: CUDA's libraries as well.
GPU ?=
PEERS := .venv-bench
# Groups of tests begin in the order of tests/budget.py: the heaviest first.
TWO_WORKERS := -n 2 --dist loadgroup --no-loadscope-reorder
# A demo that asks for a display or a network would hang on a server.
export MPLBACKEND := Agg

.PHONY: help setup lock audit-deps wheel demo test test-all test-hurt lint types unit flink-up flink-down test-flink kuberay bazel bench bench-beam bench-peers bench-serving bench-start-up table-user-level clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(STAMP) $(if $(GPU),$(CUDA))  ## Build .venv from the locked requirements (skipped when up to date); GPU=1 adds CUDA's libraries (3 GB)

# Beside TensorFlow, which looks for them there.
$(CUDA): tff_pdp/requirements-gpu.txt $(PACKAGES)
	if command -v uv >/dev/null; then \
	  uv pip install -q --no-config --python $(BIN)/python --no-deps --require-hashes -r $< ; \
	else \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile --no-deps --require-hashes -r $< ; \
	fi
	@touch $@

# Its commands and version; in seconds, where the packages are there.
$(STAMP): pyproject.toml $(PACKAGES)
	@if command -v uv >/dev/null; then \
	  uv pip install -q --no-config --python $(BIN)/python --no-deps --no-build-isolation -e . ; \
	else \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . ; \
	fi
	@touch $@

$(PACKAGES): $(LOCKS)
	@command -v $(PYTHON) >/dev/null || { echo "tff_pdp needs Python 3.11: install it, or name it with make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "tff_pdp needs Python 3.11, and $(PYTHON) is $$($(PYTHON) -V)" >&2; exit 2; }
	@echo "Setting up $(VENV): about 2 minutes and 3.5 GB the first time"
	rm -rf $(VENV)
	if command -v uv >/dev/null; then \
	  uv venv -q --seed --python $(PYTHON) $(VENV) && \
	  uv pip install -q --no-config --python $(BIN)/python --no-deps --require-hashes $(LOCKS:%=-r %) ; \
	else \
	  $(PYTHON) -m venv $(VENV) && \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile --no-deps --require-hashes $(LOCKS:%=-r %) ; \
	fi
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python3.11/site-packages >/dev/null || true
	@touch $@

RESOLVE = $(BIN)/uv pip compile pyproject.toml --upgrade --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url -q
BESIDE_RUNTIME = -c tff_pdp/requirements.txt $$(sed -n 's/^\([^ =]*\)==.*/--no-emit-package \1/p' tff_pdp/requirements.txt)
# No package is in two.
lock: setup  ## Resolve pyproject.toml again into tff_pdp/requirements.txt, requirements-gpu.txt and requirements-mlflow.txt beside it, and requirements-dev.txt
	$(RESOLVE) -o tff_pdp/requirements.txt
	$(RESOLVE) -o requirements-dev.txt --extra dev $(BESIDE_RUNTIME)
	$(RESOLVE) -o tff_pdp/requirements-gpu.txt --extra gpu $(BESIDE_RUNTIME)
	$(RESOLVE) -o tff_pdp/requirements-mlflow.txt --extra mlflow $(BESIDE_RUNTIME)

audit-deps: setup  ## Compare the pins with the list of known vulnerabilities in tools/audit_deps.toml
	$(BIN)/python -m tools.audit_deps

wheel: setup  ## Build the wheel, in dist/
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .

demo: setup  ## Raw data to served personal models; DATA=<folder of LEAF JSON> for your own
	$(BIN)/tff-pdp demo $(if $(DATA),--data "$(DATA)")

test: lint types unit  ## Every gate: lint, types, doctests and tests; ten minutes on two cores

test-all: lint types  ## Every gate, with the tests that are too long for every change
	$(BIN)/python -m pytest -q $(TWO_WORKERS) -m "not hurt" --timeout 600 --budget=enforce

test-hurt: setup  ## Only the tests that kill, damage and flood; an hour or two
	$(BIN)/python -m pytest -q -m hurt --timeout 3600

lint: setup  ## ruff: style and format; import-linter: layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo $(BIN)/lint-imports
	@told=$$($(BIN)/lint-imports --no-cache --no-logo) || { echo "$$told"; exit 1; }

types: setup  ## basedpyright
	$(BIN)/basedpyright

unit: setup  ## doctests and tests
	$(BIN)/python -m pytest -q $(TWO_WORKERS) -m "not all and not hurt"

flink-up: setup  ## Start a Flink cluster on this machine and print the Beam flags; FLINK_PORT=<first of five ports>
	@$(BIN)/python tools/flink/cluster.py up

flink-down:  ## End that cluster
	@! [ -d build/flink ] || $(BIN)/python tools/flink/cluster.py down

test-flink: setup  ## Start a Flink cluster, run the Beam jobs on it, end it
	@trap '$(BIN)/python tools/flink/cluster.py down' EXIT; trap 'exit 130' INT TERM; \
	flags=$$($(BIN)/python tools/flink/cluster.py up) && TFF_PDP_FLINK="$$flags" $(BIN)/python -m pytest -q tests/flink

kuberay: setup  ## Compare the manifests for Ray on Kubernetes with KubeRay's schema, which is downloaded once
	$(BIN)/python -m tools.kuberay.check

bazel: setup  ## Query, build and test with Bazel, offline
	tools/bazel/check

bench: setup  ## Seconds per round beside the floor, stock TFF and the peers that are installed; writes docs/performance.md; DEVICE=gpu on a GPU
	$(BIN)/python -m benchmarks.rounds.run --device $(DEVICE)
	$(if $(filter cpu,$(DEVICE)),$(BIN)/python -m benchmarks.rounds.dp_sgd_step)
	$(BIN)/python -m benchmarks.rounds.table

bench-beam: setup  ## Cost of preparing contact graphs, by size and engine, beside a Polars script; FULL=1 adds 186 million contacts
	$(BIN)/python -m benchmarks.preparing.run $(if $(FULL),--full)

bench-serving: setup  ## Exports, loads and calls of personal models by layout and number of clients, and the server; 15 minutes
	$(BIN)/python -m benchmarks.serving.run

bench-start-up: setup  ## How long help, account and the demo's first round take to start; 2 minutes
	$(BIN)/python -m benchmarks.start_up.run

bench-peers: setup $(PEERS)/fedjax/.complete $(PEERS)/pfl/.complete  ## Install FedJAX and pfl for make bench (6 GB)

table-user-level: setup  ## Methods of user-level DP on 539 real writers; writes runs/table_user_level; DATA=<folder with mnist and mnist_writers>
	$(BIN)/tff-pdp reproduce mnist_writers --output runs/table_user_level $(if $(DATA),--data "$(DATA)")

$(PEERS)/%/.complete: benchmarks/peers/%.txt
	rm -rf $(@D)
	@# --no-config: the overrides in pyproject.toml are TFF's, not theirs.
	if command -v uv >/dev/null; then \
	  uv venv -q --no-config --python $(PYTHON) $(@D) && \
	  uv pip install -q --no-config --python $(@D)/bin/python --no-deps --require-hashes -r $< ; \
	else \
	  $(PYTHON) -m venv $(@D) && \
	  $(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r $< ; \
	fi
	@touch $@

clean:  ## Remove what was built; keeps your runs
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
