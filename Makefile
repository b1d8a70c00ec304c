# Each target does its own set-up: `make demo` or `make test` is enough on a fresh machine.

PY = .venv/bin/python
DEMO_CMD = $(PY) -m demo
BENCHES = cycle checkpoint cli scale
PYTEST_ARGS =
# Most tests wait for Slurm rather than compute: more processes than cores only make waits run out.
JOBS = 2

.PHONY: help setup demo mutate test test-debian13 test-pyslurm check format bench docs clean

help:
	@echo "make demo            the main job on a private Slurm cluster: failures, drains, resubmission, audit"
	@echo "make test            every test (unit, property, contract, end-to-end)"
	@echo "make test-debian13   what needs a real Slurm, under Debian 13 and Slurm 24.11 (root, debootstrap)"
	@echo "make test-pyslurm    what pyslurm reads: SLURM=/prefix of a Slurm, PYTHON=an interpreter with pyslurm for it"
	@echo "make check           format, lint, types, import contracts"
	@echo "make format          rewrite the code in the project's format"
	@echo "make bench-recovery  time from a failure to the next new step, ours and the others': fails past a target"
	@echo "make bench-scale     what a cluster of 2,048 nodes costs, and how fast the command starts: fails past a target"
	@echo "make mutate          10,000 damaged checkpoints: fails when one is believed or resumed from"
	@echo "make bench-checkpoint what saving, verifying and restoring cost, against DCP's own: fails past a target"
	@echo "make bench           the other benchmarks"
	@echo "make docs            regenerate the pages that are made from the code"
	@echo "make setup           only the set-up, which every other target calls"
	@echo "make clean           remove what was built or measured, and the environment"

setup:
	@scripts/setup

demo: setup
	$(DEMO_CMD)

test: setup
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-debian13: setup
	tests/debian13/run

# PYTHON: any environment with pyslurm, the project's dependencies and pytest; docs/pyslurm.md says how to make one.
PYSLURM_TESTS = tests/contract tests/slurm/test_pyslurm_client.py tests/slurm/test_pyslurm_real.py

test-pyslurm:
	@test -x "$(SLURM)/sbin/slurmctld" || { echo "SLURM=/prefix: there is no sbin/slurmctld in '$(SLURM)'"; exit 2; }
	@"$(PYTHON)" -c 'import importlib.metadata as m; m.version("pyslurm")' || { echo "PYTHON=...: no pyslurm"; exit 2; }
	PATH="$(SLURM)/sbin:$(SLURM)/bin:$$PATH" "$(PYTHON)" -m pytest $(PYSLURM_TESTS) $(PYTEST_ARGS)

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# bench-recovery runs bench/recovery.py, and so on.
bench-%: setup
	$(PY) -m bench.$(subst -,_,$*)

mutate: setup
	$(PY) -m bench.mutations

bench: $(BENCHES:%=bench-%)

docs: setup
	$(PY) scripts/write_docs.py

clean:
	rm -rf .venv .setup .peers .demo build dist bench/results
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
