# Needs python3 and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(VENV)/.lab
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n 2 --durations=10
# Checked without running: this machine need not have them. 3.11 and 3.12 run in CI.
PYTHONS := 3.10 3.13
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help install demo test test-all lint pythons unit unit-all bench attack deploy-check families figures docs dist clean

help:
	@echo "make demo     install, then compare batch norm, BKN, the recipe and other norms on digits (about 5 minutes on two cores)"
	@echo "make test     install, lint, type-check, test (about 20 minutes on two cores)"
	@echo "make test-all  the same with the wide sweeps"
	@echo "make pythons  resolve all extras and check types for Python $(PYTHONS); installs and runs nothing there"
	@echo "make bench    time one norm, forward and backward, beside nn.BatchNorm2d on this machine"
	@echo "make attack   attack every area and record what went wrong for docs/reliability.md (hours)"
	@echo "make deploy-check  convert, fold and export 20 families, and compare their logits (minutes)"
	@echo "make families  check the wiring of every timm family and torchvision classifier (long on a CPU)"
	@echo "make figures  redraw the pictures of README and site from their records"
	@echo "make docs     build the documentation site into build/site; a warning is an error"
	@echo "make dist     build the wheel and the source archive into dist"
	@echo "make install  only create .venv, pinned, with all extras"

install: $(INSTALLED)

$(LAB): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[lab]'
	@touch $@

$(INSTALLED): $(LAB)
	$(PIP) --editable '.[lab,cluster,test,docs,release]'
	@touch $@

demo: $(LAB)
	$(BIN)/kalmannorm demo

test: lint unit

test-all: lint unit-all

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Whether the pins of all extras have wheels that fit together, and whether mypy accepts the source for this version.
pythons: install
	@mkdir -p build
	for version in $(PYTHONS); do \
	  $(BIN)/uv pip compile --quiet --all-extras --constraint constraints.txt --only-binary :all: \
	    --python-version $$version --python-platform linux --output-file build/python-$$version.txt pyproject.toml && \
	  $(BIN)/mypy --python-version $$version || exit 1; \
	done

# The second command runs the kernels in Triton's interpreter. Its status is 5 where there is no Triton: no tests.
unit: install
	$(PYTEST) -m "not wide"
	TRITON_INTERPRET=1 $(PYTEST) -m "not wide" || [ $$? -eq 5 ]

unit-all: install
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) || [ $$? -eq 5 ]

bench: install
	$(BIN)/kalmannorm bench op

attack: install
	$(BIN)/python benchmarks/attack.py

deploy-check: install
	$(BIN)/python benchmarks/deploy.py --check

families: install
	$(BIN)/python benchmarks/families.py

figures: install
	$(BIN)/python docs/figures/draw.py

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: install
	$(BIN)/python -m build --no-isolation --outdir dist

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
