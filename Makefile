# Everything runs in .venv with the versions of requirements-dev.txt; PYTHON says which Python makes it.
# `make demo ARGS="--topk 4"` and `make test ARGS="-k tree"` pass arguments on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGED := mtp_kernels triton_ops bench csrc $(wildcard examples/pair)
SOURCES := $(shell find $(PACKAGED) -type f -not -path '*/__pycache__/*' -not -path 'mtp_kernels/lib/*' -not -name '*.so') \
	setup.py CMakeLists.txt pyproject.toml $(wildcard README.md LICENSE)
CPP := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-transformers-5.17 build lint format clean

# Watch the example pair decode with and without drafting.
demo: $(VENV)/.installed
	$(BIN)/mtp-kernels demo $(ARGS)

# The tests test the installed package, not this folder; a process a core, a file of tests in one of them.
test: $(VENV)/.installed
	$(BIN)/pytest -n auto --dist loadfile tests $(ARGS)

# What runs inside transformers, on the oldest version that is supported.
test-transformers-5.17: $(VENV)/.installed
	$(PIP) install --upgrade --target $(VENV)/transformers-5.17 transformers==5.17.0 'numpy<2.4'
	PYTHONPATH=$(VENV)/transformers-5.17 $(BIN)/pytest tests/test_accelerate.py tests/test_generate.py $(ARGS)

# The compiled parts, in place: for running from this folder with PYTHONPATH=. MTP_TEST_SOURCE=1.
build: $(VENV)/.tools
	$(BIN)/python setup.py build_ext --inplace

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

# Everything built, but not .venv.
clean:
	rm -rf build dist *.egg-info mtp_kernels/lib mtp_kernels/_host*.so $(VENV)/.installed

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	touch $@

$(VENV)/.tools: $(VENV)/.torch requirements-dev.txt
	$(PIP) install -r requirements-dev.txt
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(PIP) install --no-deps --force-reinstall .
	touch $@
