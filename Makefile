# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Parallel tests each start their own ranks: more threads than cores only slows them down.
export OMP_NUM_THREADS ?= 1
# Tests start thousands of processes: without bytecode each would compile the package anew, a third of a second of `inspect`.
unexport PYTHONDONTWRITEBYTECODE
# Two processes more than there are cores; the tests of a file stay together, as they share real runs, in the order of
# tests/conftest.py.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo quick test test-slow test-all check docs changelog repeat net bench load fuzz mutants test-oldest test-newest test-nightly clean

# What a developer needs is in groups of pyproject.toml; the first pip that knows these is 25.1.
NEW_PIP := -m pip install --quiet --upgrade 'pip>=25.1'
DEVELOPED := --group dev --editable '.[browse,compressed,remote,yaml]'

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(NEW_PIP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(DEVELOPED)
	@touch $@

demo: .venv/.installed
	@rm -rf demo
	$(BIN)/python -m tools.demo demo

# The rooms that every command goes through.
QUICK := model files keys inspect verify diff contents ls match stats
quick: .venv/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" tests/test_imports.py $(QUICK:%=tests/%)

test: .venv/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

# Every strategy in every layout, several nodes, restarts; every command for every fixture; browsers.
test-slow: .venv/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m slow

# Both at once: what is collected and what is trained for several tests is so once, and no process waits between them.
test-all: .venv/.installed
	$(BIN)/python -m pytest $(PARALLEL)

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/towncrier build --draft --version next >/dev/null

# The site, in build/site: opened from there, without a server, it is searched too.
docs: .venv/.installed
	$(BIN)/python -m mkdocs build --strict --quiet

# What the next release changes.
changelog: .venv/.installed
	$(BIN)/towncrier build --draft --version next

# Runs on two nodes, by spawn, resumed, killed: so many times, each with the bits of the undisturbed run; an hour for ten.
TIMES ?= 10
repeat: .venv/.installed
	$(BIN)/python -m tools.repeated --times $(TIMES)

# Does every command still find in every fixture what it found before, and as fast? Two minutes; run before each push.
net: .venv/.installed
	$(BIN)/python -m tools.net

bench: .venv/.installed
	$(BIN)/python -m tools.benchmarks

load: .venv/.installed
	$(BIN)/python -m tools.benchmarks.load

# Seconds for all targets together; what it finds is kept in .fuzz, so that the next run goes on from there.
SECONDS ?= 600
fuzz: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group fuzz --editable .
	$(BIN)/python -m tools.fuzz --seconds $(SECONDS)

# The oldest versions that pyproject.toml allows, and the newest that there are, each in an environment of its own.
# Not in every run of the tests: their torch is the one for GPUs, with gigabytes of libraries.
OLDEST ?= python3.10
NEWEST ?= $(PYTHON)
test-oldest:
	$(OLDEST) -m venv .venv-oldest
	.venv-oldest/bin/python $(NEW_PIP)
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt $(DEVELOPED)
	.venv-oldest/bin/python -m pytest $(PARALLEL)

test-newest:
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python $(NEW_PIP)
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $(DEVELOPED)
	.venv-newest/bin/python -m pytest $(PARALLEL)

# The torch of tonight, to know of a change before it is released; NIGHTLY is PyTorch's index of nightly CPU builds.
NIGHTLY ?=
test-nightly:
	$(NEWEST) -m venv .venv-nightly
	.venv-nightly/bin/python $(NEW_PIP)
	.venv-nightly/bin/python -m pip install --quiet $(DEVELOPED)
	.venv-nightly/bin/python -m pip install --quiet --upgrade --pre torch --index-url $(NIGHTLY)
	.venv-nightly/bin/python -m pytest $(PARALLEL)

# Faults at random in a copy of the package: do the tests that run the line notice? 200 take an hour of two processes; before
# the first, which tests run which line is recorded in .mutants, for an hour more. The exit code is 0 from 85% on.
SAMPLE ?= 200
SEED ?= 7
MODULES ?=
mutants: .venv/.installed
	$(BIN)/python -m tools.mutants --sample $(SAMPLE) --seed $(SEED) $(MODULES)

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-nightly demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
