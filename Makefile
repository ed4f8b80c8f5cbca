# Every daily command. Each sets up the private environment in .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
WORKERS ?= auto

# Keep compiled modules: without them each worker and each process that a test starts compiles the tree again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint types house mutations walk bench bench-scale chaos fuzz soak format lock man picture wheel release release-check deb clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Hashes pin every package; --no-deps keeps the project itself from pulling anything that is not locked.
define set_up
	@echo "setting up $(VENV), once: it takes half a minute"
	@$(PYTHON) -P -m venv $(VENV)
	@$(BIN)/pip install --disable-pip-version-check --no-deps --require-hashes -r $(1) | awk ' \
	  /^Collecting/ && ++fetched % 20 == 0 { print "  " fetched " packages fetched"; fflush() } \
	  /^Installing/ { print "  installing " fetched " packages"; fflush() }'
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
endef

$(READY) $(DEMO_READY): SHELL := bash
$(READY) $(DEMO_READY): .SHELLFLAGS := -o pipefail -c
$(READY): requirements.lock pyproject.toml
	$(call set_up,requirements.lock)

# Of the same lock what a relay has, what the demo and the installation of a clone need besides, and no tools: half of it.
$(DEMO_READY): requirements.lock requirements-relay.lock pyproject.toml
	@mkdir -p $(VENV)
	@awk 'BEGIN { split("editables hatchling nats-py nkeys packaging pathspec pluggy trove-classifiers", more); \
	    for (each in more) wanted[more[each]] } \
	  /^[a-z]/ { name = $$1; sub(/==.*/, "", name) } \
	  NR == FNR { wanted[name]; next } \
	  name in wanted' requirements-relay.lock requirements.lock >$(VENV)/demo.lock
	$(call set_up,$(VENV)/demo.lock)

demo: $(or $(wildcard $(READY)),$(DEMO_READY)) ## watch an MCP client call real tools on this machine, end to end
	@$(BIN)/relay demo $(DEMO_ARGS)

PROFILE ?= daily

# These compute, and wait for nothing: two processes keep two cores busy, each with about half of them. A coordinator
# of workers, to which each test is reported, would take as long for most of them as they do themselves.
SINGLE_PARTS := $(BIN)/pytest --quiet --hypothesis-profile=$(PROFILE) -m "not integration"
HALVES := single-parts-of-relay single-parts-of-others

.PHONY: $(HALVES)
single-parts-of-relay:
	@$(SINGLE_PARTS) tests/relay

single-parts-of-others:
	@$(SINGLE_PARTS) tests/schemas tests/kubelet tests/test_*.py

# In parallel, for most of these wait longer than they compute; a worker that is done takes over tests of another.
INTEGRATION := $(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal $(RERUNS)

CHECKS ?= lint types

# mypy uses one core: whatever can run beside it does.
check: $(READY) ## style, layering, types, and the tests of single parts: the daily loop
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target PROFILE=$(PROFILE) $(CHECKS) $(HALVES)

test: check ## all that check does, and all tests but the long ones, which LONG=yes adds
	@$(INTEGRATION) --hypothesis-profile=$(PROFILE) -m "integration$(if $(LONG),, and not long)" $(TEST_ARGS)

test-all: ## everything CI checks: also storms, the official suite, other clients, more examples
	@$(MAKE) --no-print-directory test LONG=yes PROFILE=thorough

lint: $(READY) ## style and layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(READY) ## strict types
	@$(BIN)/mypy

house: $(READY) ## the size of the tree: rooms, imports between them, lines, and the modules of a call
	@$(BIN)/python -P -m tests.house.rooms
	@echo
	@$(BIN)/python -P -m tests.house.call_path

mutations: $(READY) ## plant faults in a copy of the tree, each of which a quick test must catch; ONLY="name name"
	@$(BIN)/python -P -m tests.house.mutations $(ONLY:%=--only %)

walk: STEPS ?= 1000000
walk: SEED ?= 1

walk: $(READY) ## a random walk through the model of delivery: STEPS=n SEED=s
	@$(BIN)/python -P -m tests.model.walk --steps $(STEPS) --seed $(SEED)

bench: $(READY) ## ratios against named references, measured in one run
	@$(BIN)/python -P -m bench

NODES ?= 50000

bench-scale: $(READY) ## NODES=n mock nodes at five relays: what a fleet costs as it grows, with a plot; by hand
	@NODES=$(NODES) $(BIN)/python -P -m bench.scale

FAULTS ?= 10000

RELAYS ?= 1

chaos: $(READY) ## FAULTS=n seeded faults between real processes, RELAYS=1 or 3; SEED=s replays a schedule
	@$(BIN)/python -P -m tests.chaos --faults $(FAULTS) --relays $(RELAYS) $(if $(SEED),--seed $(SEED))

soak: MINUTES ?= 1

soak: $(READY) ## MINUTES=n of calls, reconnects and restarts of the broker: nothing may grow
	@$(BIN)/python -P -m tests.soak --minutes $(MINUTES)

# Apart from the rest: atheris has no wheel for every Python.
FUZZ_READY := $(VENV)/.fuzz-ready
fuzz: MINUTES ?= 10

$(FUZZ_READY): requirements-fuzz.lock $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
	  -r requirements-fuzz.lock || { echo "make fuzz: atheris has no wheel for this Python; CPython 3.11 has" >&2; exit 69; }
	@touch $@

# Clients that others wrote, each in an environment of its own: they need other versions of what the relay uses.
CLIENTS_READY := $(VENV)/.clients-ready
CLIENT_LOCKS := $(wildcard tests/conformance/*.lock)

$(CLIENTS_READY): $(CLIENT_LOCKS) $(READY)
	@set -e; for lock in $(CLIENT_LOCKS); do environment=$(VENV)/clients/$$(basename $$lock .lock); \
	  $(BIN)/python -P -m venv --clear --without-pip $$environment; \
	  $(BIN)/pip --python $$environment/bin/python install --quiet --disable-pip-version-check --no-deps \
	    --require-hashes -r $$lock; done
	@touch $@

fuzz: $(FUZZ_READY) ## MINUTES=n of fuzzing, guided by coverage; TARGETS="a b" for some of the parsers
	@$(BIN)/python -P -m tests.fuzz --minutes $(MINUTES) $(TARGETS)

format: $(READY) ## rewrite the sources in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock: ## renew the lock files (needs uv)
	$(LOCK) --extra dev pyproject.toml -o requirements.lock
	$(LOCK) pyproject.toml -o requirements-node.lock
	$(LOCK) --extra agent pyproject.toml -o requirements-agent.lock
	$(LOCK) --extra relay --extra broker pyproject.toml -o requirements-relay.lock
	$(LOCK) --group fuzz -o requirements-fuzz.lock
	$(LOCK) --group release -o requirements-release.lock
	$(LOCK) --resolution lowest-direct --extra demo --extra agent --extra otel pyproject.toml -o requirements-lowest.lock
	echo "mcp<2" | $(LOCK) - -o tests/conformance/python-sdk-1.lock
	echo "fastmcp" | $(LOCK) - -o tests/conformance/fastmcp.lock

man: $(READY) ## write the man pages, from the commands, to build/man
	@$(BIN)/python -P packaging/man_pages.py build/man

kinds: $(READY) ## write docs/kinds.md, from the kinds that ship
	@$(BIN)/python -P packaging/kinds_page.py

picture: $(READY) ## draw the picture of the README, from what the demo prints
	@$(BIN)/python -P packaging/terminal_picture.py docs/demo.svg

wheel: $(READY) man ## build the wheel, and test what it installs
	@PYTHON=$(PYTHON) .ci/wheel

release: $(READY) ## all that a release consists of, in dist; DRAFT=yes, RELEASE_ARGS="--here --help ..."
	@$(BIN)/python -P packaging/release.py $(if $(DRAFT),--draft) $(RELEASE_ARGS)

release-check: $(READY) ## what CI has no time for, of the release in dist: each artefact installed, each Python; ROWS="a b"; by hand
	@.ci/release-check $(ROWS)

deb: $(READY) ## build the Debian packages for this release and architecture, with an apt source of them
	@$(MAKE) --no-print-directory release DRAFT=yes RELEASE_ARGS=--here

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) bench/out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
