# make demo    a drafter trained, measured and judged on this machine, from nothing
# make test    every test
# make check   formatting, lint, types, import contracts
# make up      Prefect, MLflow, a worker, and SageMaker on this machine: run form, approvals, endpoints
# make setup   the two environments; the others call it
# make lock    rewrite both lock files from the environments as they are
# make clean   remove what runs wrote (.fledge), not the environments
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Processes that test side by side: one mostly on vLLM, one on deployments, which wait most of the time.
WORKERS ?= 2
.PHONY: help setup demo test check up lock clean .venv .venv-vllm

help:
	@grep -E '^# make ' Makefile | sed 's/^# //'

setup:
	@$(MAKE) --no-print-directory -j2 .venv .venv-vllm

.venv:
	@scripts/make_environment.sh .venv requirements.lock .

.venv-vllm:
	@scripts/make_environment.sh .venv-vllm containers/vllm/requirements.lock containers/vllm

demo: setup
	@.venv/bin/python -m examples.demo

test: setup
	@scripts/install_chromium.sh
	@.venv/bin/python -m examples.smollm2
	@.venv/bin/python -m pytest -n $(WORKERS) $(ARGS)

check: .venv
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

up: setup
	@.venv/bin/fledge up

lock:
	@scripts/freeze_environment.sh .venv requirements.lock
	@scripts/freeze_environment.sh .venv-vllm containers/vllm/requirements.lock

clean:
	@rm -rf .fledge
