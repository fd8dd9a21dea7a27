# `make workbook`: installs lmcore into .venv, executes the notebooks, ends with a PDF for each handout and with pages.
# Without a GPU on Linux, the CPU build of PyTorch (see its installation page) spares the CUDA libraries.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Tests and jobs start hundreds of short processes, which should not compile the same modules each time.
export PYTHONDONTWRITEBYTECODE :=

SCALE ?= smoke
DATA ?= embedded
OUT ?= runs/$(SCALE)
NOTEBOOKS ?=
HANDOUT ?= cse599o-a1-part2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3 python,\
  $(shell command -v $(name) >/dev/null 2>&1 && $(name) -c '$(SUITABLE)' >/dev/null 2>&1 && echo $(name))))

SHAPED := lmcore.functional,lmcore.model,lmcore.optimizer,lmcore.sampling
SHAPED_TESTS := tests/test_functional.py tests/test_model.py tests/test_optimizer.py tests/test_sampling.py

A2 ?=
.PHONY: help install workbook record pages lint test test-slurm test-faults official handin student grade lab refresh-notebooks clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20
	@echo 'For example: make workbook SCALE=gpu DATA=path/to/stories OUT=runs/full'

install: $(INSTALLED)  ## only .venv with lmcore and the workbook in it

# At smoke scale, two groups of notebooks of which none reads what the other makes run at once, each on one core.
TRAINING := 01 02 03 08 10
MEASURING := 04 05 06 07 09
RUN = $(BIN)/workbook run --scale "$(SCALE)" --data "$(DATA)" --out "$(OUT)"

# 1: a notebook has failed, and what there is makes PDFs and pages all the same.
workbook: $(INSTALLED)  ## execute all notebooks, make PDFs and pages (SCALE=smoke|laptop|gpu DATA= OUT= NOTEBOOKS=)
	@code=0; if [[ "$(SCALE)" == smoke && -z "$(strip $(NOTEBOOKS))" ]]; then \
	  $(RUN) --no-writeup --notebooks $(MEASURING) & beside=$$!; trap "kill $$beside" INT TERM HUP; \
	  $(RUN) --no-writeup --notebooks $(TRAINING) || code=$$?; wait $$beside || code=$$((code > $$? ? code : $$?)); \
	  if ((code <= 1)); then $(BIN)/workbook writeup "$(OUT)" || code=$$?; fi; \
	else $(RUN) $(if $(strip $(NOTEBOOKS)),--notebooks $(NOTEBOOKS)) || code=$$?; fi; \
	if ((code <= 1)); then $(BIN)/python docs/build_pages.py "$(OUT)/notebooks" "$(OUT)/pages"; fi; exit $$code

# The machine whose tables in results/ are read: nothing is measured, so a CPU is enough.
# A notebook without answers there has no records yet: it is left out, and its problems count as "not yet".
MACHINE ?= h200
NUMBERED = $(basename $(notdir $(wildcard notebooks/[0-9][0-9]_*.ipynb)))
RECORDED = $(shell sed -n 's/^ "\([0-9][0-9]_[a-z_]*\)": {$$/\1/p' results/$(MACHINE)/answers.json)
record: $(INSTALLED)  ## from results/h200: notebooks and PDFs in writeup/h200, figures, tables of README and docs, pages
	@$(if $(strip $(NOTEBOOKS)),,rm -rf runs/record)
	@$(foreach name,$(filter-out $(RECORDED),$(NUMBERED)),echo '$(name) has no records in results/$(MACHINE) yet: it is left out.';)
	@$(BIN)/workbook run --scale gpu --out runs/record --no-writeup \
	  --parameters 'records="$(CURDIR)/results/$(MACHINE)"' --notebooks $(or $(strip $(NOTEBOOKS)),$(RECORDED))
	@$(BIN)/python results/publish.py runs/record writeup/$(MACHINE)
	@mkdir -p figures
	@rm -rf figures/$(MACHINE) && mv writeup/$(MACHINE)/figures figures/$(MACHINE)
	@$(BIN)/python tests/notebook_cells.py $(or $(strip $(NOTEBOOKS)),$(RECORDED))
	@$(BIN)/python results/tables.py
	@$(BIN)/python docs/build_pages.py writeup/$(MACHINE)/notebooks build/pages

# Executed notebooks, guides and the library's documentation. BOOK is the folder of the notebooks, PAGES that of the pages.
BOOK ?= writeup/$(MACHINE)/notebooks
PAGES ?= build/pages
pages: $(INSTALLED)  ## the committed book as pages: build/pages/index.html (another one: BOOK= PAGES=)
	@$(BIN)/python docs/build_pages.py "$(BOOK)" "$(PAGES)"

lint: $(INSTALLED)  ## style, the layers of imports, the types of the core, and the budgets of lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/python tests/budgets.py

# -n auto: a worker for each core, see tests/conftest.py. In the tests of the SHAPED modules the shapes in their
# signatures are checked at run time. A notebook's cells stay together, and each kernel has one thread.
test: lint  ## lint, tests, and the notebooks against their committed outputs
	$(BIN)/pytest -n auto --dist worksteal -p no:nbval $(addprefix --ignore=,$(SHAPED_TESTS))
	$(BIN)/pytest -n auto --dist worksteal -p no:nbval --jaxtyping-packages=$(SHAPED),beartype.beartype $(SHAPED_TESTS)
	env -u MPLBACKEND OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout=900 notebooks

# Most of them wait: each worker has a cluster of its own.
test-slurm: $(INSTALLED)  ## the job scripts on a private Slurm cluster on this machine, which needs Slurm's daemons
	$(BIN)/pytest -m slurm -rs -n 3 --dist worksteal tests/slurm

test-faults: $(INSTALLED)  ## training runs killed, damaged and starved at random moments: they resume to the same result
	$(BIN)/pytest -m faults -rs -n auto --dist worksteal tests/faults

official: $(INSTALLED)  ## the course's own tests of assignment 2, or of another, in a checkout of it (A2=path)
	@$(BIN)/python tests/official.py "$(A2)"

handin: $(INSTALLED)  ## the hand-in of OUT (HANDOUT=, the name of a PDF: cs336-a1)
	@$(BIN)/workbook handin $(if $(filter-out file,$(origin OUT) $(origin SCALE)),"$(OUT)") --handout "$(HANDOUT)"

STUDENT ?= student
student: $(INSTALLED)  ## the edition for students: no solutions, outputs or answers (STUDENT=, a new folder)
	@$(BIN)/workbook student "$(STUDENT)"

HANDINS ?=
GRADES ?= grades
grade: $(INSTALLED)  ## the hand-ins of a course in HANDINS=, for HANDOUT=: table and rubrics in GRADES=
	@$(BIN)/workbook grade "$(HANDINS)" --handout "$(HANDOUT)" --to "$(GRADES)"

lab: $(INSTALLED)  ## JupyterLab: notebook 01, with the whole project beside it
	$(BIN)/jupyter lab --notebook-dir . --FileContentsManager.post_save_hook=workbook.notebook.after_save \
	  notebooks/01_build.ipynb

refresh-notebooks: $(INSTALLED)  ## execute the notebooks at their defaults and rewrite their committed outputs
	@for notebook in notebooks/*.ipynb; do echo "$$notebook"; env -u MPLBACKEND $(BIN)/jupyter nbconvert \
	  --log-level ERROR --execute --inplace "$$notebook"; done
	@$(BIN)/jupyter nbconvert --log-level ERROR --inplace --coalesce-streams notebooks/*.ipynb
	@for notebook in notebooks/*.ipynb; do $(BIN)/python -m workbook.notebook <"$$notebook" >"$$notebook.new"; \
	  mv "$$notebook.new" "$$notebook"; done

clean:  ## remove .venv and caches; runs/ and data/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --no-compile: half of the time would go into modules that nobody imports.
$(INSTALLED): pyproject.toml workbook/pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
	  echo 'No Python from 3.11 on with venv was found: install one (on Debian and Ubuntu with python3-venv), or name it with make PYTHON=/path/to/python3.' >&2; exit 2; fi
	@if [ ! -x $(BIN)/python ]; then echo "Making $(VENV) with $$($(PYTHON) --version)."; $(PYTHON) -m venv $(VENV); fi
	@echo 'Installing lmcore and its dependencies into $(VENV) (a few minutes the first time).'
	@$(BIN)/python -m pip install --no-compile --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' -e ./workbook \
	  | sed -En 's/^(Downloading .*MB\)|Installing collected packages|Installing build).*/  \1/p'
	@git config filter.notebook.clean '$(BIN)/python -m workbook.notebook' 2>/dev/null || true  # see .gitattributes
	@touch $@
