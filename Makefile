# make bert: install into .venv, train BERT on this machine.    make test: install, then every check.
# make docs: the pages as HTML, in build/docs.                  make wheel: the package, in dist.
# make locked: install what requirements-dev.txt names, to the byte, in place of the newest.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.trains
DEVELOPS := $(VENV)/.develops

.PHONY: bert test types tests thorough locked lock peers docs wheel clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(TRAINS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[cli,models]'
	touch $@

$(DEVELOPS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $(TRAINS) $@

locked: | $(BIN)/python
	$(BIN)/python -m pip install --require-hashes --requirement requirements-dev.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	touch $(TRAINS) $(DEVELOPS)

# requirements-dev.txt anew, for every Python and platform at once.
lock:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --upgrade -o requirements-dev.txt

# NPROC=1 gives each CPU device a core of its own.
bert: $(TRAINS)
	NPROC=1 $(BIN)/python -m jvpipe.train --model bert $(ARGS)

test: $(DEVELOPS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs 2 types tests

# Pyright runs while tests wait for processes.
types: $(DEVELOPS)
	$(BIN)/pyright

tests: $(DEVELOPS)
	$(BIN)/pytest

# Every case of the grids of which the tests above try one of each kind.
thorough: $(DEVELOPS)
	$(BIN)/pytest --thorough

# Environments of other systems, whose parsers read our exports; what cannot be had is left out, and its tests are skipped.
# MaxText wants Python 3.12, and of what it needs its configuration reads a part.
PEER = $(or $(2),$(PYTHON)) -m venv build/peers/$(1) && build/peers/$(1)/bin/python -m pip install
peers:
	-$(call PEER,torch) torch==2.13.0
	-$(call PEER,transformers) torch==2.13.0 transformers==5.24.0 safetensors
	-$(call PEER,megatron) torch==2.13.0 numpy packaging && \
		build/peers/megatron/bin/python -m pip install --no-deps megatron-core==0.16.1
	-$(call PEER,maxtext,$(PYTHON312)) jax==0.10.2 flax==0.12.8 jinja2 omegaconf pathwaysutils pydantic pyyaml \
		tensorboardx && build/peers/maxtext/bin/python -m pip install --no-deps maxtext==0.2.5
	-test -n "$(JAXPP)" && $(call PEER,jaxpp) "$(JAXPP)"

# What is a link in docs is a file in build/pages.
docs: $(DEVELOPS)
	rm -rf build/pages && mkdir -p build && cp -RL docs build/pages
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going build/pages build/docs

wheel: $(DEVELOPS)
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

clean:
	rm -rf $(VENV) build dist *.egg-info
