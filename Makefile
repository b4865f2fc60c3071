# Every target makes and reuses its own .venv; nothing but Python 3.11 (or newer) and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: demo test slow lint bench docs format clean

demo: $(VENV)/.installed
	$(BIN)/dpps train --out out/demo --overwrite
	$(BIN)/dpps report out/demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

slow: $(VENV)/.dev  ## the published numbers, on the full data sets ($$DPPS_DATA)
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## six minutes on two idle cores; a table, and JSON and a plot in benchmarks/results
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/.dev
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) out build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
