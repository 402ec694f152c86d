# make demo   install into .venv and run the demo (one to three minutes on two CPU cores)
# make test   install and run every check (CONSTRAINTS= for the newest versions instead of the pinned ones, after make clean)
# make test-all  the same with the slow tests: more methods, kills, damaged files, and more of the served page
# make setup  install alone
# make docs   build the documentation site into site/
# make wheel  build wheel and sdist and try them outside the checkout (some minutes; PYTHON= for another version)
# make pages  make the pages and tables that come from results/ anew
PYTHON ?= python3
CONSTRAINTS ?= --constraint constraints.txt
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-all setup check format docs wheel pages clean

demo: setup
	$(BIN)/engram demo

test: setup check
	$(BIN)/pytest -n auto --dist worksteal

test-all: setup check
	$(BIN)/pytest -n auto --dist worksteal -m ''

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("engram needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "installing into .venv; torch is large, so this can take a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[dev]'
	touch $(STAMP)

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: setup
	$(BIN)/python tools/try_wheel.py --python $(PYTHON) --sdist

pages: setup
	$(BIN)/engram results page docs/reproduction.md results
	$(BIN)/engram results summary src/engram/reproduce/papers/measured.json results
	$(BIN)/python tools/compare_methods.py docs/methods/compared.md results
	$(BIN)/python tools/compare_bench.py docs/bench.md results
	$(BIN)/python tools/fill_cards.py docs/methods results

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist build site
