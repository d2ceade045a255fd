# make demo | test | test-slow | test-oldest | lint     The first one installs everything into .venv, once.
# Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -c constraints.txt

.PHONY: demo test test-slow test-oldest lint

demo: $(READY)
	@$(VENV)/bin/adaspec demo

test: $(READY)
	$(VENV)/bin/python -m pytest -m "not slow" -n auto

test-slow: $(READY)
	$(VENV)/bin/python -m pytest -m slow

test-oldest:
	$(PYTHON) -m venv .venv-oldest
	grep -v '^transformers==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip --disable-pip-version-check install -c .venv-oldest/constraints.txt \
		--editable ".[dev]" transformers==5.20.0
	.venv-oldest/bin/python -m pytest -m "not slow" -n auto tests/adapters tests/decoding tests/serving

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"adaspec needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables setuptools
	$(PIP) --no-build-isolation --editable ".[dev]"
	@touch $@
