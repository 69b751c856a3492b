# Needs make and Python >= 3.10, nothing else: the first target that needs it sets up .venv.
PYTHON ?= python3
# Further arguments for pytest, e.g. make test ARGS='-k nan -x'.
ARGS ?=

BIN := .venv/bin
DEV := .venv/.stamp-dev
# A development set-up can run the demo too, so the smaller one is made only where there is none.
DEMO := $(if $(wildcard $(DEV)),$(DEV),.venv/.stamp-demo)

# One torch thread per process: the workers share the cores, and results do not depend on how many there are.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format docs dist bench campaign pictures clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '  make %-10s %s\n' "$$target" "$$text"; done

demo: $(DEMO)  ## watch a run survive injected faults
	$(BIN)/gradsentinel demo

test: $(DEV)  ## run all tests (ARGS='...' goes to pytest)
	$(PYTEST) $(ARGS)

test-fast: $(DEV)  ## run the tests that need neither several processes, a compiler, a browser nor patience
	$(PYTEST) -m "not multiprocess and not simnpu and not browser and not slow" $(ARGS)

lint: $(DEV)  ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)  ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(DEV)  ## build the documentation into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict --quiet

dist: $(DEV)  ## make sdist and wheel, check them, and try the wheel in an empty environment
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/empty_environment.py dist/*.whl

bench: .venv/.stamp-bench  ## measure what the watch costs, beside what one would use instead (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py $(ARGS)

campaign: $(DEV)  ## train under 200 faults, guarded in several ways, and publish what was measured (six to twelve minutes)
	OMP_NUM_THREADS=1 $(BIN)/gradsentinel campaign --docs docs $(ARGS)

pictures: $(DEV)  ## make the screenshots of the documentation anew (needs Chromium)
	OMP_NUM_THREADS=1 $(BIN)/python tests/views/pictures.py

clean:  ## remove caches and build products (.venv and run directories stay)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name .venv -prune -o -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# $(call install,EXTRA): make .venv where there is none, then install the project with one extra.
define install
	@test -x $(BIN)/python || command -v $(PYTHON) >/dev/null || { \
		echo "error: '$(PYTHON)' not found; install Python 3.10 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "error: $$($(PYTHON) --version 2>&1) is too old; Python 3.10 or newer is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: '$(PYTHON)' comes without venv; install it (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Setting up .venv; the first time takes a few minutes."; $(PYTHON) -m venv --clear .venv; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
	@touch $@
endef

.venv/.stamp-dev: pyproject.toml constraints.txt
	$(call install,dev)

.venv/.stamp-bench: pyproject.toml constraints.txt
	$(call install,bench)

.venv/.stamp-demo: pyproject.toml constraints.txt
	$(call install,demo)
