# make bert: install into .venv, train BERT on this machine.    make test: install, then every check.
# make docs: the pages as HTML, in build/docs.                  make wheel: the package, in dist.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.trains
DEVELOPS := $(VENV)/.develops

.PHONY: bert test thorough docs wheel clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(TRAINS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[cli,models]'
	touch $@

$(DEVELOPS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $(TRAINS) $@

# NPROC=1 gives each CPU device a core of its own.
bert: $(TRAINS)
	NPROC=1 $(BIN)/python -m jvpipe.train --model bert $(ARGS)

test: $(DEVELOPS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest

# Every case of the grids of which the tests above try one of each kind.
thorough: $(DEVELOPS)
	$(BIN)/pytest --thorough

docs: $(DEVELOPS)
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going docs build/docs

wheel: $(DEVELOPS)
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
