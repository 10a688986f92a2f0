# Everything here works in .venv, which `make` creates. Second runs are quick: a stamp file says what is
# installed, and a change of the native sources or of the package's metadata installs again.

PYTHON ?= python3
VENV   ?= .venv
# CPU builds are enough. Installed before the rest, so that nothing pulls in another build.
TORCH  ?= torch==2.13.0
# ONNX Runtime for what the machine has: cpu or gpu. They cannot be installed side by side.
ORT    ?= $(if $(wildcard /dev/nvidia[0-9]*),gpu,cpu)
DEMO_cpu := cpu
DEMO_gpu := gpu,tune

BIN     := $(VENV)/bin
PACKAGE := moonpoly_ort custom_ops graph_passes tuned
CODE    := $(PACKAGE) examples tests setup.py $(wildcard benchmarks)
NATIVE  := $(wildcard custom_ops/runtime/*.cc custom_ops/runtime/*.h custom_ops/runtime/*.map)

.PHONY: test check format demo install clean help

help:
	@echo "make test    install into $(VENV), run the whole CPU test suite"
	@echo "make demo    rewrite and run a real text-recognition model"
	@echo "make check   ruff, mypy, clang-format"
	@echo "make format  let ruff and clang-format rewrite the sources"
	@echo "make clean   remove what was built; keeps $(VENV) and .models"

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

check: install
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/clang-format --dry-run -Werror $(filter %.cc %.h,$(NATIVE)) examples/cpp_session/main.cc
	@# mypy does not follow the folder mapping of setuptools: show it the layout of an installed package.
	@rm -rf build/typed && mkdir -p build/typed/moonpoly_ort
	@ln -s $(CURDIR)/moonpoly_ort/* $(CURDIR)/custom_ops $(CURDIR)/graph_passes $(CURDIR)/tuned build/typed/moonpoly_ort/
	cd build/typed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p moonpoly_ort

format: install
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/clang-format -i $(filter %.cc %.h,$(NATIVE)) examples/cpp_session/main.cc

install: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py $(NATIVE)
	$(BIN)/python -m pip install --quiet -e ".[$(ORT),tune,dev]"
	@touch $(VENV)/.demo $@

# What the demo needs, which is much less.
$(VENV)/.demo: pyproject.toml setup.py $(NATIVE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[$(DEMO_$(ORT))]"
	@touch $@

clean:
	rm -rf build dist *.egg-info moonpoly_ort/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.installed $(VENV)/.demo
	find $(PACKAGE) tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
