# Two commands matter: `make demo` and `make test`. Both set up what they need and are fast the second time.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps

.PHONY: demo test lint types check-tests install conformance sanitize soak clean help

help:
	@echo "make demo   create $(VENV), install, ask the demo model about a few pictures"
	@echo "make test   install what tests need; run lint, types and all tests"
	@echo "make lint | types | check-tests   one part of make test"
	@echo "make conformance  every family against generate(), long form; writes docs/supported-models.md"
	@echo "make sanitize  the CPU kernels under sanitizers"
	@echo "make soak COUNT=2000 SEED=0 DEMO=40   mixed requests, each as if it were alone"
	@echo "make clean  remove $(VENV) and everything that was made in this folder"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp a set of requirements: pip runs again only if pyproject.toml changed.
$(STAMPS)/user: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/user

install: $(STAMPS)/dev

demo: $(STAMPS)/user
	$(BIN)/mmserve demo

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev
	$(BIN)/mypy

check-tests: $(STAMPS)/dev
	$(BIN)/python -m pytest

test: lint types check-tests

conformance: $(STAMPS)/dev
	$(BIN)/mmserve conformance

# The kernels under the address and undefined-behaviour sanitizers, on buffers with guard pages: half a minute to
# compile and a quarter to run; `build/bounds amx` runs one instruction set's.
sanitize:
	@mkdir -p build
	$(CXX) -std=c++20 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-psabi -Wno-unknown-pragmas \
	  -include tests/unit/mmserve/kernels/checked_tiles.h \
	  -Immserve/kernels/csrc tests/unit/mmserve/kernels/bounds.cpp mmserve/kernels/csrc/isa_*.cpp \
	  mmserve/kernels/csrc/dispatch.cpp -o build/bounds
	build/bounds

# Requests to the mock model and to the demo model, against each by itself; see the script's head.
COUNT ?= 2000
SEED  ?= 0
DEMO  ?= 40
soak: $(STAMPS)/dev
	$(BIN)/python tests/unit/mmserve/engine/soak.py --count $(COUNT) --seed $(SEED) --demo $(DEMO)

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache
