# `make example` releases the bundled checkpoint into ./release; `make test` runs the whole suite; `make tutorial`
# runs docs/tutorial.md, `make docs` builds the pages. All need only Python 3.11 to 3.14, git and make, and leave everything
# in .venv. `make test CONSTRAINTS=constraints-newest.txt VENV=.venv-newest` takes another lock, in another environment.

PYTHON ?= python3
VENV ?= .venv
SEED ?= default
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# The suite starts some hundred processes, which would all compile the whole package.
unexport PYTHONDONTWRITEBYTECODE
# Three keep two cores busy: tests wait for the servers that they start.
PROCESSES := --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Triton decides as it is imported whether kernels are interpreted.
INTERPRETED := TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/pytest tests/kernels/interpreted
# To collect the other files takes longer than some of these tests.
ALONE := $(shell grep -rl "mark\.alone" tests --include="test_*.py")
EXAMPLE := examples/qwen3-pycode-5m
# Each recipe says why it depends on the CPU.
FLAGS := $(shell grep -m 1 ^flags /proc/cpuinfo 2>/dev/null)
RECIPE := examples/int4-example$(if $(filter avx512_bf16,$(FLAGS)),,-other-cpus).yaml

.PHONY: another-lock install example tutorial docs test most-tests types-and-kernels test-all test-random test-isas test-pythons
.PHONY: compile-tests lint types style clean

# Holds the name of the lock that is installed: another one is installed anew.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS) install_torch.sh $(if $(filter $(CONSTRAINTS),$(shell cat $(VENV)/installed 2>/dev/null)),,another-lock)
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and "Scalegate needs Python 3.11 to 3.14; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	./install_torch.sh $(BIN)/python $(CONSTRAINTS)
	$(BIN)/pip install --quiet -e '.[dev]' -c $(CONSTRAINTS)
	echo $(CONSTRAINTS) > $@

install: $(VENV)/installed

example: install
	$(BIN)/pipeline release $(EXAMPLE) --recipe $(RECIPE) \
	  --work release/work --to folder:release/qwen3-pycode-5m-int4

tutorial: install
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/whole_way.sh

docs: install
	$(BIN)/mkdocs build --strict

# What CI runs first, and what the README names.
test: install lint
	$(MAKE) --no-print-directory -j 2 types-and-kernels most-tests
	$(BIN)/pytest $(ALONE) -m "alone and not gpu and not exhaustive" $(ORDER)

# These tests wait now and then: one process more keeps both cores busy.
most-tests: install
	$(BIN)/pytest -m "not gpu and not alone and not exhaustive" $(PROCESSES) $(ORDER)

# Beside them: its output would stand among theirs, and comes when all has run.
types-and-kernels: types
	@echo "$(INTERPRETED)"
	@$(INTERPRETED) -m "not gpu and not exhaustive" $(ORDER) > $(VENV)/kernels.log 2>&1; status=$$?; \
	  cat $(VENV)/kernels.log; exit $$status

# And then all else that a machine with no GPU can run: every fault, shape and form.
test-all: test
	$(BIN)/pytest -m "exhaustive and not gpu and not alone" $(PROCESSES)
	$(INTERPRETED) -m "exhaustive and not gpu" $(PROCESSES)
	$(BIN)/pytest $(ALONE) -m "exhaustive and alone and not gpu"

# In a random order. Pytest prints the seed first: `make test-random SEED=7` repeats an order.
test-random: export ORDER := -p randomly --randomly-dont-reset-seed --randomly-seed=$(SEED)
test-random: test

# Every kernel by each Triton that is supported; each is installed into .tritons/, once.
compile-tests: install
	PYTHON=$(BIN)/python tests/kernels/on_each_triton.sh $(TRITONS)

# Each supported Python that is to be had, in an environment of its own.
test-pythons:
	tests/on_each_python.sh

# The tests of numbers as on CPUs with fewer instructions than this one has.
test-isas: install
	$(BIN)/python -P tests/on_each_isa.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow editable installs: the link gives it the tree under its import name.
types: install
	mkdir -p .venv/import-root && ln -sfn "$(CURDIR)" .venv/import-root/scalegate
	$(BIN)/mypy

style: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tritons release whole-way site build *.egg-info
