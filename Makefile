# Two commands are enough for a newcomer: `make demo` and `make test`. Everything sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A file's tests stay in one process, for they share what they have trained.
IN_PARALLEL := OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --maxprocesses 8 --dist loadfile

.PHONY: demo demo-real test test-all check fix docs site notebook dist bench bench-quick fuzz mutants clean

demo: $(READY)  ## watch a small model learn, in a few minutes
	$(BIN)/covey demo

demo-real: $(READY)  ## watch a pretrained model of 135M learn, in two to eight minutes; downloads 93 MB
	$(BIN)/covey demo --real

test: $(READY)  ## the tests that need neither GPU nor network
	$(IN_PARALLEL)

test-all: $(READY)  ## the slow ones too
	$(IN_PARALLEL) -m "not gpu and not network"

check: $(READY)  ## style (Python, JavaScript), types, layers, examples in docstrings, pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file .ci/scripts.ini
	$(BIN)/lint-imports
	$(BIN)/oxlint src/covey/insight/pages/static
	$(BIN)/pytest --doctest-modules src packages/verify/src -q --ignore-glob="*/trackers/to_*"  # each needs its own package
	$(BIN)/codespell
	$(BIN)/python docs/check.py

fix: $(READY)  ## repair what can be repaired automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## check every page's links, commands, configs and paths
	$(BIN)/python docs/check.py

site: $(READY)  ## the pages as a site, with search and references, in site; fails on a broken link
	$(BIN)/python docs/website.py

notebook: $(READY)  ## run the notebooks of the docs again
	$(BIN)/pip install --quiet --disable-pip-version-check nbconvert ipykernel
	PYTHONWARNINGS=ignore $(BIN)/jupyter nbconvert --log-level ERROR --execute --to notebook --inplace \
	    --ClearMetadataPreprocessor.enabled=True docs/notebooks/*.ipynb

dist: $(READY)  ## wheels and source of both packages, in dist
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist packages/verify
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

bench: $(READY)  ## beside TRL and generate, then the demo over ten seeds, in about an hour; into benchmarks/results
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e packages/verify -e '.[bench]'
	$(BIN)/python benchmarks/speed --cells rollout --dtypes fp32 bf16 --write
	$(BIN)/python benchmarks/speed --cells update --write
	$(BIN)/python benchmarks/speed --cells step --rounds 1 --write
	$(BIN)/python benchmarks/speed/learn.py --seeds 1 --write
	$(BIN)/python benchmarks/demo_seeds.py --write

bench-quick: $(READY)  ## this machine beside those of docs/performance.md, in two minutes
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e packages/verify -e '.[bench]'
	$(BIN)/python benchmarks/speed --quick

fuzz: $(READY)  ## an hour of made-up tokenizers, templates and rows: is what is trained what was meant?
	$(BIN)/python benchmarks/border.py --minutes 60

mutants: $(READY)  ## would the tests notice? mistakes in the mathematics and the wiring, one at a time
	$(BIN)/python benchmarks/mutants.py --write

$(READY): pyproject.toml packages/verify/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("covey needs Python 3.11 or newer: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e packages/verify -e '.[dev]'
	git config core.hooksPath .githooks 2>/dev/null || true  # a copy without git has no hooks
	touch $@

clean:  ## remove the environment and caches, never runs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
