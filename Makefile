# make demo   text to a trained, talking model on this machine
# make test   the whole suite but the long tests; make test-long: those, which take minutes each;
#             make check: ruff, types and fast tests, for every commit
# make faults  38 kinds of fault injected, a line each (part of make test); make faults-long: all cases of them;
#             make faults-soak: 500 kills of runs, on a machine with many cores
# make fuzz   random layouts and options against one process; make fuzz CASES=2000 JOBS=12 SEED=1 FUZZ="--json FILE"
# make fuzz-storage   runs in object storage with a hostile service and a second writer; SEED=1 CASES=200
# make fuzz-gpu   the same on a GPU: CUDA graphs, fp8, rollbacks, kernels of Triton
# make mutants  defects seeded one by one in copies of this tree; do the tests that are named for each find it?
#             make mutants TIER=check JOBS=12 MUTANTS="--json FILE": do those of make check (test, fuzz, verify)?
#
# Each target makes its own virtual environment first. PYTHON chooses the interpreter (3.10 to 3.13), TORCH the version of
# torch, TORCH_INDEX its source, for example one with a build for your GPU or for the CPU alone. Without these two, a torch of
# a tested version that is installed already, or that pip finds among wheels by PIP_FIND_LINKS, comes before the newest one:
#     make demo TORCH_INDEX=URL      make test PYTHON=python3.11 TORCH=2.11.0 VENV=.venv-2.11
PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TORCH_INDEX ?=
TORCH_RANGE := $(shell sed -n 's/^ *"\(torch>=[^"]*\)".*/\1/p' pyproject.toml)
MINOR := $(shell $(PYTHON) -c "import sys; print(sys.version_info[1])" 2> /dev/null)
TORCH_NEWEST := $(shell sed -n 's/^$(if $(filter 10,$(MINOR)),\# Python 3.10: )torch==//p' constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
TESTS := $(BIN)/python -m pytest

CASES ?= 60
JOBS ?= 2
SEED ?= 0
FUZZ ?=
TIER ?= named
MUTANTS ?=

FAULTS = $(TESTS) -n 2 -q tests/faults/test_summary.py $(shell grep -rl --include='test_*.py' mark.fault tests)

.PHONY: demo test check test-long faults faults-long faults-soak fuzz fuzz-storage fuzz-gpu mutants elastic bench install clean
.DEFAULT_GOAL := demo

$(VENV)/base: pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes one to three minutes, more where torch is downloaded slowly ..."
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else 'Python 3.10 to 3.13 is needed, $(PYTHON) is %d.%d; try make PYTHON=python3.12' % v)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(if $(TORCH)$(TORCH_INDEX),,$(PIP) --no-index --no-deps '$(TORCH_RANGE)' 2> /dev/null ||) \
	    $(PIP) -c $(VENV)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(or $(TORCH),$(TORCH_NEWEST))
	@$(PIP) -c $(VENV)/constraints.txt -e .
	@touch $@

$(VENV)/test: $(VENV)/base
	@$(PIP) -c $(VENV)/constraints.txt -e '.[test]'
	@touch $@

install: $(VENV)/base

demo: $(VENV)/base
	@$(BIN)/meshwright demo

test: $(VENV)/test
	$(TESTS) -n 2 -m "not long"

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TESTS) -n 2 -q -m "not whole and not long"

test-long: $(VENV)/test
	$(TESTS) -n 2 -m "long"

faults: $(VENV)/test
	$(FAULTS) -m "fault and not long"

faults-long: $(VENV)/test
	$(FAULTS) -m fault

faults-soak: $(VENV)/test
	PYTHONPATH=src:tests $(BIN)/python -m faults.soak

fuzz: $(VENV)/test
	PYTHONPATH=src:tests $(BIN)/python -m fuzz --cases $(CASES) --jobs $(JOBS) --seed $(SEED) $(FUZZ)

fuzz-storage: $(VENV)/test
	PYTHONPATH=src:tests $(BIN)/python -m fuzz.storage --cases $(CASES) --seed $(SEED)

fuzz-gpu: $(VENV)/test
	PYTHONPATH=src:tests $(BIN)/python -m fuzz --device cuda --cases $(CASES) --jobs $(JOBS) --seed $(SEED) $(FUZZ)

mutants: $(VENV)/test
	PYTHONPATH=src:tests $(BIN)/python -m mutants --tier $(TIER) --jobs $(JOBS) --seed $(SEED) $(MUTANTS)

elastic: $(VENV)/test
	$(TESTS) -s -m long tests/runtime/launch/test_elastic.py tests/runtime/launch/test_on_ray.py

bench: $(VENV)/test
	$(BIN)/python benchmarks/loop.py

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
