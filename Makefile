# SPDX-License-Identifier: Apache-2.0
# make demo: from a fresh checkout to the first CDF on real engines, without a GPU.
# make test: everything that must hold, real engines included.
# Both set up what they need, may be repeated, and may be interrupted.
# make browser: Chromium for the test of the report page; make test tries it, and says so where it may not.
# make slurm: Debian's SLURM, which tests start for themselves; likewise.

PYTHON ?= python3
BIN := .venv/bin
# Many tests wait for processes to start or end; on two cores a third process fills the gaps.
TEST_PROCESSES ?= 3

.PHONY: demo test check docs pages env lock bundle clean browser slurm

demo: .venv/workflow.complete
	$(BIN)/snakemake

test: .venv/dev.complete
	$(MAKE) --no-print-directory -j2 check docs browser slurm
	$(BIN)/python -m compileall -q splitbench
	$(BIN)/python -m pytest -n $(TEST_PROCESSES)

check: .venv/dev.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint

# Debian's own package, and fonts for both languages; without the right to install, the test is skipped and says why.
browser:
	@for name in chromium chromium-browser google-chrome; do \
	  command -v $$name >/dev/null && exit 0; done; \
	if [ -n "$$SPLITBENCH_CHROMIUM" ]; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
	    chromium fonts-dejavu-core fonts-noto-cjk >/dev/null; \
	else echo "make browser: no Chromium, and this user may not install it; the page's test will be skipped"; fi

# Debian starts its daemons after an install unless a policy forbids it; the tests start their own, with their own files.
# After the other: apt works for one at a time.
slurm: | browser
	@if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq --no-install-recommends \
	    slurmctld slurmd slurm-client munge iproute2 >/dev/null; \
	else echo "make slurm: no SLURM, and this user may not install it; its tests will be skipped"; fi

# The users' guide, in site/; dead links and pages without a place in the navigation are errors. No network.
docs: .venv/dev.complete
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Reference pages and the JSON Schema, made again from the code.
pages: .venv/workflow.complete
	$(BIN)/python -m splitbench.manual

env: .venv/workflow.complete

# The marker is written last, so an interrupted set-up starts over. Bytecode is made now: where Python is told not to
# write any (PYTHONDONTWRITEBYTECODE), every job would compile pandas and snakemake anew, two to three seconds a job.
.venv/workflow.complete: envs/workflow.lock envs/uv.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "splitbench needs Python 3.11 or newer; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r envs/uv.lock
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r envs/workflow.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	$(BIN)/python -m compileall -q splitbench
	touch $@

.venv/dev.complete: .venv/workflow.complete envs/dev.lock
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r envs/dev.lock
	touch $@

# The serving environment's lock has a script of its own: envs/lock-serving-cpu.sh
lock: .venv/workflow.complete
	for name in uv workflow dev; do \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	    envs/$$name.in --output-file envs/$$name.lock || exit 1; done
	sh envs/lock-conda.sh

# What a GPU node without network lacks, to be carried there: make bundle STACK=h200 OUT=folder
bundle: .venv/workflow.complete
	$(BIN)/splitbench bundle $(STACK) $(OUT)

clean:
	rm -rf .venv .splitbench .snakemake site
