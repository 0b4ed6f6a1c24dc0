# Everything runs in .venv, made from requirements.lock. Needs python3 (>= 3.11) and make.
#   make test CONTRACTS=DIR     also runs the contract tests in DIR, unchanged, against the installed wheel and the work tree
#   make test PYTEST_ARGS=...   other pytest arguments, for example PYTEST_ARGS="tests/unit -x"

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist loadgroup
CONTRACTS ?=

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.made-from-lock

.PHONY: help demo test check bench crash soak clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    watch the agent work, be killed and go on; needs no key"
	@echo "make test    all tests, with coverage; CONTRACTS=DIR adds a folder of contract tests"
	@echo "make check   ruff, pyright, import-linter and the lock file"
	@echo "make bench   measure speed and memory"
	@echo "make crash   kill the agent 3,000 times and check what is left"
	@echo "make soak    kill the gateway under load for a minute, and send it 5,000 odd requests"
	@echo "make clean   remove .venv and what the tools left"

demo: $(READY)
	@$(VENV)/bin/hermes demo

test: $(READY)
	$(RUN) -m coverage erase
	HERMES_CONTRACTS="$(abspath $(CONTRACTS))" $(RUN) -m coverage run -m pytest $(PYTEST_ARGS)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report
ifneq ($(strip $(CONTRACTS)),)
	empty=$$(mktemp -d) && cd "$$empty" && env -u PYTHONPATH \
	  "$(abspath $(RUN))" -m pytest -p no:cacheprovider --rootdir="$(abspath $(CONTRACTS))" "$(abspath $(CONTRACTS))"
endif

check: $(READY)
	$(RUN) -m ruff check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports --no-logo
	$(RUN) scripts/check_lock.py

bench: $(READY)
	$(RUN) -m bench

crash: $(READY)
	$(VENV)/bin/hermes selftest crash --kills 3000

soak: $(READY)
	HERMES_SOAK=1 $(RUN) -m pytest -s tests/acceptance/test_gateway_load.py tests/acceptance/test_gateway_fuzz.py

clean:
	rm -rf $(VENV) dist build .coverage .coverage.* .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements.lock pyproject.toml hermes_agent_old_names.pth
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hermes-agent needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: its venv and ensurepip are missing (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check --quiet --require-hashes --only-binary :all: -r requirements.lock
	$(RUN) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --no-index --editable .
	@touch $@
