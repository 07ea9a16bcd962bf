# `make demo` and `make test` work in a fresh clone: they create .venv, install what pyproject.toml asks for and build the
# extensions whenever a source changed.

JOBS ?= 2
PYTEST_ARGS ?=
SOAK_SECONDS ?= 3600
VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; break; fi; done)
SOURCES := setup.py $(wildcard asynckv/*.pyx asynckv/*.pxd asynckv/*.pxi asynckv/*.h)

.PHONY: all demo test test-nightly test-release soak lint build clean
.PHONY: test-matrix fuzz test-sanitize coverage mutants

all: build

demo: build
	$(BIN)/python -m asynckv demo

test: build $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# The whole suite with larger campaigns, see docs/testing.md; JOBS test processes share the work.
test-nightly test-release: test-%: build $(VENV)/.test
	ASYNCKV_TEST_LEVEL=$* $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# The suite with each engine, with refused rings, as an ordinary user and on each file system; PLACES names some of them.
test-matrix: build $(VENV)/.test
	$(BIN)/python tests/matrix.py $(PLACES)

soak: build
	$(BIN)/python benchmarks/soak.py --seconds $(SOAK_SECONDS)

lint: $(VENV)/.dev build
	$(BIN)/ruff check .
	$(BIN)/mypy
	PATH=$(BIN):$$PATH $(BIN)/cython-lint asynckv

# Copies of the tree with extensions of their own, under build/: tests/fuzz/variant.py. FUZZ_SECONDS of CPU time for each
# target, FUZZ_SEED repeats a run, FUZZ_TARGETS="record segment" chooses.
fuzz: $(VENV)/.test
	$(BIN)/python tests/fuzz/variant.py sanitize python tests/fuzz/fuzz.py $(FUZZ_TARGETS)

test-sanitize: $(VENV)/.test
	$(BIN)/python tests/fuzz/variant.py sanitize pytest -s --timeout 600 $(PYTEST_ARGS)

coverage: $(VENV)/.coverage
	$(BIN)/python tests/fuzz/variant.py coverage python tests/fuzz/lines.py $(PYTEST_ARGS)

mutants: build $(VENV)/.test
	$(BIN)/python tests/mutants/kill.py $(MUTANTS)

build: build/.built

$(VENV)/.base: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" \
		> $(VENV)/build-requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/build-requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e .
	touch $@

build/.built: $(VENV)/.base $(SOURCES)
	mkdir -p build
	$(BIN)/python setup.py --quiet build_ext --inplace --parallel $(JOBS)
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.coverage: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[coverage]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f asynckv/*.so asynckv/*.c asynckv/*.html
	find asynckv tests examples -name __pycache__ -type d -exec rm -rf {} +
