# `make serve` and `make test` are all that a fresh machine needs; `make help` lists the rest.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3# the interpreter that .venv is made with, once
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
BENCHMARKS := $(patsubst benchmarks/%.py,%,$(filter-out benchmarks/instant_%,$(shell grep -l __main__ benchmarks/*.py))) classification

.PHONY: help serve test check format models bench lock k8s table clean

help: ## list the targets
	@grep -E '^[a-z0-9]+:.*## ' Makefile | sed -E 's/^([a-z0-9]+):.*## /  make \1\t/' | expand -t 16

# The environment is stale as soon as the lock or pyproject.toml is newer than the last installation.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "raystream needs Python 3.11 or newer; this is $$($(PYTHON) --version 2>&1)." \
			"Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) lacks the venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making .venv from requirements.lock; the first time takes some minutes."
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@$(PIP) install --quiet -r requirements.lock
	@$(PIP) install --quiet --no-deps -e .
	@touch $@

# `--address local`: always a Ray of its own, so that no cluster that happens to run here is touched.
# umask: Ray writes the token of its API to ~/.ray/auth_token, which is nobody else's business.
serve: $(STAMP) ## serve the embedded models on http://127.0.0.1:8000 until Ctrl-C
	@set -a; . ./serve.env; set +a; umask 077; export PATH="$$PWD/$(BIN):$$PATH"; \
		export RAY_SERVE_HAPROXY_BINARY_PATH="$$PWD/$(BIN)/raystream-haproxy"; \
		raystream-preflight serve_config.yaml; exec serve run --address local serve_config.yaml

test: $(STAMP) ## run all tests
	@$(BIN)/python -m pytest

check: $(STAMP) ## formatting, lint, types, import contracts and serve_config.yaml
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/raystream-check serve_config.yaml

format: $(STAMP) ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

models: $(STAMP) ## train the embedded models again and evaluate them
	$(BIN)/python -m models.training.train_pydoc_chat
	$(BIN)/python -m models.training.evaluate_pydoc_chat
	$(BIN)/python -m models.training.detector.sampled_documents
	$(BIN)/python -m models.training.detector.train
	$(BIN)/python -m models.training.detector.evaluate

bench: $(STAMP) ## run every module of benchmarks/
	@for name in $(BENCHMARKS); do \
		echo "== benchmarks.$$name"; $(BIN)/python -m "benchmarks.$$name"; done

# pip-compile knows no dependency groups, hence the standard input. The first edit drops the local
# part of torch's version (+cpu, where pip finds that build), the second the packages that only the
# CUDA build asks for: pip adds them where it installs that build.
lock: $(STAMP) ## resolve requirements.lock again; UPGRADE=--upgrade takes the newest versions
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' \
		| CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet $(UPGRADE) --strip-extras \
			--allow-unsafe --annotation-style=line --no-emit-options \
			--output-file=requirements.lock pyproject.toml -
	sed -i -E -e 's/^(torch==[0-9.]+)\+[a-z0-9.]+ */\1 /' -e '/^(nvidia|cuda)-|^triton==/d' \
		-e 's/-r -/raystream (dev)/; s/raystream \(pyproject\.toml\)/raystream/' requirements.lock

k8s: $(STAMP) ## write what k8s/base takes from serve_config.yaml and serve.env
	$(BIN)/python -m k8s.make_base

table: $(STAMP) ## write README's table of models from the families that the tests hold
	$(BIN)/python -m tests.engine.model_table

clean: ## remove the environment and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
