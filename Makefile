# make train   train the digits network with `phalanx run`
# make test    run the tests
# make ecosystem  run other people's libraries and scripts on Phalanx; installs them, a minute once
# make bench   measure against torch's own DistributedDataParallel
# make docs    build the site of the documentation in site/; a warning is an error
#
# Each sets up .venv first, which takes about a minute once.

PYTHON := $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
BIN := .venv/bin
# An editable installation points to one folder, so a copied tree needs its own.
INSTALLED := .venv/installed-$(shell printf '%s' '$(CURDIR)' | cksum | cut -d ' ' -f 1)

.PHONY: train test ecosystem bench docs clean
.DELETE_ON_ERROR:

train: $(INSTALLED)
	$(BIN)/phalanx run -n 2 examples/train_digits.py

# Two halves side by side: most tests wait for something, and a process or two are busy at a time.
test: $(INSTALLED)
	printf '%s\n' "tests/procs tests/peer" "tests/pure tests/threads tests/test_*.py" \
		| xargs -P 2 -I HALF sh -c '$(BIN)/python -m pytest -q HALF'

ecosystem: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,examples,ecosystem]'
	$(BIN)/python -m pytest -m ecosystem tests/ecosystem

bench: $(INSTALLED)
	$(BIN)/phalanx bench

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,examples]'
	touch $@

clean:
	rm -rf .venv runs build site *.egg-info .pytest_cache .hypothesis
