# make bert: install into .venv, train BERT on this machine.    make test: install, then every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: bert test clean

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $@

# NPROC=1 gives each CPU device a core of its own.
bert: $(INSTALLED)
	NPROC=1 $(BIN)/python -m jvpipe.train --model bert $(ARGS)

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build *.egg-info
