# Everything runs in .venv with the versions of requirements-dev.txt; PYTHON says which Python makes it.
# `make demo ARGS="--topk 4"` and `make test ARGS="-k tree"` pass arguments on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGED := mtp_kernels triton_ops bench csrc $(wildcard examples/pair)
SOURCES := $(shell find $(PACKAGED) -type f -not -path '*/__pycache__/*' -not -path 'mtp_kernels/lib/*' -not -name '*.so') \
	setup.py CMakeLists.txt pyproject.toml $(wildcard README.md LICENSE)
CPP := $(shell find csrc tests/emulation -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# Bytecode is kept, whatever the shell says: pip installs without (below), and what is imported is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-transformers-5.17 build sanitize clang lint format clean

# Watch the example pair decode with and without drafting.
demo: $(VENV)/.installed
	$(BIN)/mtp-kernels demo $(ARGS)

# Threads that wait give their processor up: as many processes as processors, of two threads each, would take from each
# other what they wait with, two fifths of all time in the tests of ops.
test sanitize clang: export OMP_WAIT_POLICY := passive

# The tests test the installed package, not this folder; a process a core, a file of tests in one of them, in the order
# of tests/conftest.py.
test: $(VENV)/.installed
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder tests $(ARGS)

# What runs inside transformers, on the oldest version that is supported.
test-transformers-5.17: $(VENV)/.installed
	$(PIP) install --upgrade --target $(VENV)/transformers-5.17 transformers==5.17.0 'numpy<2.4'
	PYTHONPATH=$(VENV)/transformers-5.17 $(BIN)/pytest tests/test_accelerate.py tests/test_generate.py $(ARGS)

# The compiled parts, in place: for running from this folder with PYTHONPATH=. MTP_TEST_SOURCE=1.
build: $(VENV)/.tools
	$(BIN)/python setup.py build_ext --inplace

# The op tests on a CPU library with AddressSanitizer and UndefinedBehaviorSanitizer, built in a folder of its own.
# SANITIZE_TESTS chooses files of tests; the preloaded libstdc++ is there for the sanitizer to find its exceptions. What
# it prints names source files by their paths, which another library must not hold. Kernels for other
# processors and csrc/host are left out: these tests do not run them.
SANITIZED := build/sanitize
NO_AVX512 := $(shell grep -qsw avx512bw /proc/cpuinfo || echo -DMTP_AVX512=OFF)
OPS := $(notdir $(basename $(wildcard mtp_kernels/ops/[a-z]*.py)))
SANITIZE_TESTS := tests/test_native.py tests/test_cpu_step.py $(wildcard $(OPS:%=tests/test_%*.py))
sanitize: $(VENV)/.tools
	CMAKE_ARGS="$$CMAKE_ARGS -DMTP_SANITIZE=ON -DMTP_CUDA=OFF -DMTP_HOST=OFF $(NO_AVX512)" $(BIN)/python setup.py -q build \
		--build-base $(SANITIZED) --build-lib $(SANITIZED)/site
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONSAFEPATH=1 \
		PYTHONPATH=$(SANITIZED)/site $(BIN)/python -m pytest -q -p no:cacheprovider -k "cpu or native" \
		--deselect tests/test_native.py::test_no_path_of_the_building_machine_is_in_the_library \
		$(SANITIZE_TESTS) $(ARGS)

# The op tests on a CPU library built by clang, the one inside the ziglang wheel, with the headers and the runtime of g++.
CLANG := build/clang
clang: $(VENV)/.tools
	$(PIP) install --upgrade --target $(CLANG)/wheel ziglang==0.17.1
	printf '#!/bin/sh\nexec "%s/zig" clang --driver-mode=g++ -resource-dir "%s/lib" "$$@"\n' \
		$(CURDIR)/$(CLANG)/wheel/ziglang $(CURDIR)/$(CLANG)/wheel/ziglang > $(CLANG)/clang++
	chmod +x $(CLANG)/clang++
	CXX=$(CURDIR)/$(CLANG)/clang++ CMAKE_ARGS="$$CMAKE_ARGS -DMTP_WERROR=ON -DMTP_CUDA=OFF" $(BIN)/python setup.py -q build \
		--build-base $(CLANG) --build-lib $(CLANG)/site
	PYTHONSAFEPATH=1 PYTHONPATH=$(CLANG)/site $(BIN)/python -m pytest -q -p no:cacheprovider -k "cpu or native" \
		$(SANITIZE_TESTS) $(ARGS)

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

# Everything built, but not .venv.
clean:
	rm -rf build dist *.egg-info mtp_kernels/lib mtp_kernels/_host*.so $(VENV)/.wheel $(VENV)/.installed

# Python compiles what is imported: half a minute. All there is, as pip compiles it, takes more than a minute.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile torch==2.13.0
	touch $@

$(VENV)/.tools: $(VENV)/.torch requirements-dev.txt
	$(PIP) install --no-compile -r requirements-dev.txt
	touch $@

# Needs torch alone, as pip builds with tools of its own: `make -j 2` builds while .tools waits for the network. Ninja is
# not to look for make's jobs: it has all processors.
$(VENV)/.wheel: $(VENV)/.torch $(SOURCES)
	rm -rf build/wheel
	MAKEFLAGS= $(PIP) wheel --no-deps --wheel-dir build/wheel .
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(VENV)/.wheel
	$(PIP) install --no-deps --force-reinstall build/wheel/*.whl
	touch $@
