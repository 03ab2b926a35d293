# A fresh machine needs only `make serve` and `make test`; `make help` lists the rest. `make serve`
# installs what serving needs into .venv; every other target adds the packages of tests and development.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Images of Python often set it: each process of a server would then compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3# the interpreter for .venv, used once
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
SERVING := .venv/.serving
STAMP := .venv/.installed
VLLM := .venv-vllm/.installed
# Tests of both engines, besides those of the clients.
NEUTRAL := $(shell grep -l 'engine_name: EngineName' -r tests/deployments tests/faults tests/serve_app --include='test_*.py')
# Tests of vLLM itself, and those of them that start engines in processes of their own.
ONLY_VLLM = $(shell grep -lE 'mark\.vllm' tests/vllm_engine/test_*.py)
STARTING = $(shell grep -lE 'VllmEngine|VllmPooler|AsyncLLM|running_engine' $(ONLY_VLLM))
IN_VLLM := nice -n 10 .venv-vllm/bin/python -m pytest -q -m 'vllm and not processes and not soak' -p tests.reruns
BENCHMARKS := $(patsubst benchmarks/%.py,%,$(filter-out benchmarks/instant_%,$(shell grep -l __main__ benchmarks/*.py))) classification costs shares

.PHONY: help serve vllm test test-vllm quick soak check format models bench lock k8s dashboards table docs docs-check vendor clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 16

# The environment is stale when the lock or pyproject.toml is newer than the last installation. One
# whose making was interrupted lacks pip, and is made again.
$(SERVING): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { \
		echo "raystream needs Python 3.11 to 3.14; this is $$($(PYTHON) --version 2>&1)." \
			"Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) lacks the venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making .venv; the first time takes some minutes."
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(PIP) install --constraint requirements.lock --editable .
	@touch $@

$(STAMP): $(SERVING)
	@echo "Adding the other packages of requirements.lock, for tests and development."
	@$(PIP) install --requirement requirements.lock
	@touch $@

# vLLM's environment holds links to our packages, so it is stale only when its lock is newer.
$(VLLM): requirements-vllm.lock | $(SERVING)
	@$(BIN)/raystream install-engine vllm
	@touch $@

# `raystream serve` starts a Ray of its own and leaves any cluster that already runs here alone.
serve: $(SERVING) ## serve the embedded models on http://127.0.0.1:8000 until Ctrl-C
	@exec $(BIN)/raystream serve serve_config.yaml

vllm: $(VLLM) ## make .venv-vllm, in which models with `engine: vllm` run

# Two processes: the tests of one mostly wait for Ray, so the other computes meanwhile, and gives way to it
# (tests/conftest.py). OpenMP's threads would wait for each other by spinning, and take the other's time.
test: $(STAMP) ## run all tests but those of `make soak`; TIMINGS=1 shows where the time goes
	@GOMP_SPINCOUNT=0 $(BIN)/python -m pytest -n 2 --no-loadscope-reorder --rerun-starved \
		$(if $(TIMINGS),-p tests.timings --durations=0)

# Tests that import vLLM run in its environment, and those of whole servers in raystream's. A file that
# starts engines has a process of its own: vLLM reads how it logs and runs once, when it is imported. The
# longest come first, and give way to the servers, which wait for Ray as in `test`.
test-vllm: $(STAMP) $(VLLM) ## run the tests that need vLLM, in at most 8 minutes
	@.venv-vllm/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
		--constraint requirements-vllm.lock pytest pytest-asyncio pytest-xdist hypothesis
	@{ \
		echo "$(BIN)/python -m pytest -q -m 'vllm and processes and not soak' --rerun-starved tests/vllm_engine"; \
		for files in "$(NEUTRAL)" tests/clients; do \
			echo "$(IN_VLLM) --rerun-starved -p tests.vllm_engine.beside -W ignore $$files"; done; \
		for files in $(STARTING); do \
			echo "$(IN_VLLM) --rerun-starved --confcutdir=tests/vllm_engine $$files"; done; \
		echo "$(IN_VLLM) --confcutdir=tests/vllm_engine $(filter-out $(STARTING),$(ONLY_VLLM))"; \
	} | GOMP_SPINCOUNT=0 xargs -P 2 -L 1 env

quick: $(STAMP) ## run the tests that need no other program and no more than a second each
	@$(BIN)/python -m pytest -n 2 --ignore=tests/ray --ignore=tests/clients --ignore=tests/k8s/live \
		-m 'not ray and not browser and not kubectl and not processes and not slow and not soak and not vllm'

soak: $(STAMP) $(VLLM) ## run the tests that take minutes by nature
	@$(BIN)/python -m pytest -m 'soak and (processes or not vllm)' -o faulthandler_timeout=0

check: $(STAMP) ## formatting, lint, types, import contracts and serve_config.yaml
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/raystream check serve_config.yaml

format: $(STAMP) ## format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

models: $(STAMP) ## train the embedded models again and evaluate them
	$(BIN)/python -m models.training.train_pydoc_chat
	$(BIN)/python -m models.training.evaluate_pydoc_chat
	$(BIN)/python -m models.training.detector.sampled_documents
	$(BIN)/python -m models.training.detector.train
	$(BIN)/python -m models.training.detector.evaluate
	$(BIN)/python -m models.training.search.train
	$(BIN)/python -m models.training.search.evaluate

bench: $(STAMP) ## run every module of benchmarks/
	@for name in $(BENCHMARKS); do \
		echo "== benchmarks.$$name"; $(BIN)/python -m "benchmarks.$$name"; done

# pip-compile does not support dependency groups, hence the standard input. The first edit drops the
# local part of torch's version (+cpu, if pip found that build). The second drops the packages that
# only the CUDA build needs: pip adds them when it installs that build. nvidia-ml-py is none of them.
lock: $(STAMP) ## resolve requirements.lock again; UPGRADE=--upgrade takes the newest versions
	$(BIN)/python -c 'import tomllib; groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; print(*groups["dev"], *groups["docs"], sep="\n")' \
		| CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet $(UPGRADE) --strip-extras \
			--extra bench --allow-unsafe --annotation-style=line --no-emit-options \
			--output-file=requirements.lock pyproject.toml -
	sed -i -E -e 's/^(torch==[0-9.]+)\+[a-z0-9.]+ */\1 /' -e '/^nvidia-ml-py==/!{/^(nvidia|cuda)-|^triton==/d}' \
		-e 's/-r -/raystream (dev)/; s/raystream \(pyproject\.toml\)/raystream/' requirements.lock

k8s: $(STAMP) ## write what k8s/ takes from serve_config.yaml, serve.env and the alerts
	$(BIN)/python -m k8s.make_base

dashboards: $(STAMP) ## write the dashboards of k8s/components/monitoring
	$(BIN)/python -m k8s.make_dashboards

table: $(STAMP) ## write the tables of docs/ that are made from the code
	$(BIN)/python -m tests.engine.model_table
	$(BIN)/python -m tests.serve_app.metrics_table
	$(BIN)/python -m tests.serve_app.configuration_tables
	$(BIN)/python -m tests.serve_app.api_reference
	$(BIN)/python -m tests.k8s.alerts_table
	$(BIN)/python -m tests.vllm_engine.neutral_table

docs: $(STAMP) ## build the documents' site in build/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/mkdocs.yml

docs-check: $(STAMP) ## check the documents' links and tables, and run their examples against a server
	@$(BIN)/python -m pytest tests/docs tests/test_made_table.py tests/ray/test_examples.py

vendor: $(STAMP) ## fetch what the pages / and /docs take from npm and from pydoc-search
	$(BIN)/python -m tests.serve_app.playground.vendor

clean: ## remove the environment and every cache
	rm -rf build .venv .venv-vllm .venv-clients .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
