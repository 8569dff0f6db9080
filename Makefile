PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint docs setup browser clean

demo: $(VENV)/.ready  ## set up, then train the learned sampler on the embedded data
	$(BIN)/adahop train

test: $(VENV)/.ready-test  ## set up, then run the tests
	$(BIN)/python -m pytest -n $${TEST_JOBS:-2}

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready-docs  ## build the documentation into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

setup: $(VENV)/.ready-test

browser:  ## a Chromium for the report's test, where apt can give one; without it that test skips
	@for b in chromium chromium-browser google-chrome; do command -v $$b >/dev/null && exit 0; done; \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null || \
	echo "no Chromium: the report is not tested in a browser"

# torch first and alone: a range would pull a CUDA build of gigabytes where a CPU wheel is all that is needed
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch==2.13.0
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml lab/pyproject.toml
	$(PIP) install -q -c constraints.txt -e . -e ./lab
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(PIP) install -q -c constraints.txt -e '.[test,metis,browser]' -e ./lab
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) install -q -c constraints.txt -e '.[docs]' -e ./lab
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info lab/build lab/dist lab/src/*.egg-info
