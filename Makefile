# Every target makes and reuses its own .venv; nothing but Python 3.11 (or newer) and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: demo test test-portable coverage slow lint bench docs format clean

demo: $(VENV)/.installed
	$(BIN)/dpps train --features scattering --model linear --shared all --out out/demo --overwrite
	$(BIN)/dpps report out/demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

# What computes, as other processors and numbers of threads compute it, with more processes than cores and in random order.
NUMERICAL := tests/test_same_results.py tests/protocol tests/learning tests/models \
	tests/sensitivity tests/noise tests/paper/test_theorems.py tests/paper/test_convergence.py

test-portable: $(VENV)/.dev  ## the numerical tests on three kinds of machine
	DNNL_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 4 --random-order $(NUMERICAL)
	DNNL_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q -n 2 --random-order $(NUMERICAL)
	OMP_NUM_THREADS=4 $(BIN)/python -m pytest -q -n 4 --random-order $(NUMERICAL)

coverage: $(VENV)/.dev  ## lines of src that no test reaches
	$(BIN)/python -m pytest -n 2 --cov=dpps --cov-report=term-missing:skip-covered

slow: $(VENV)/.dev  ## the published numbers, on the full data sets ($$DPPS_DATA)
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs src examples scripts benchmarks notebooks
	$(BIN)/yamllint -s .github .pre-commit-config.yaml CITATION.cff mkdocs.yml

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## about a quarter of an hour on two idle cores; a table, and JSON and a plot in benchmarks/results
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
