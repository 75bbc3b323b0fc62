# make demo and make test need python3 (3.10+, with venv) and a C++20 compiler; cmake and ninja come
# from pip. Run `make help`.
.DEFAULT_GOAL := help
SHELL := /bin/bash
export PIP_DISABLE_PIP_VERSION_CHECK := 1
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(VENV)/bin

native_sources := CMakeLists.txt $(shell find csrc -type f)
oldest_triton := build/triton-3.6.0
newest_triton := build/triton-3.9.0
aarch64_toolchain := cmake/aarch64-linux-gnu.cmake
python_sources := $(shell find python/freetoken -type f -not -path '*/__pycache__/*' -not -name '*.so')
native_tests := $(shell find tests/native -type f)

# Set-up: a virtual environment with the pinned tools and dependencies.
$(VENV)/.deps: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "FreeToken needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -q -r constraints.txt
	touch $@

# Build: the package goes into the environment as a wheel; the CMake build directory is kept.
$(VENV)/.installed: $(VENV)/.deps pyproject.toml $(native_sources) $(python_sources) README.md LICENSE
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip install -q --no-deps --no-build-isolation \
	  --force-reinstall .
	touch $@

build/native-%/.configured: native_options = -DFT_SANITIZE=$(patsubst plain,,$*)
build/native-emulated/.configured: native_options = -DFT_EMULATED=ON
build/native-aarch64/.configured: native_options = -DCMAKE_TOOLCHAIN_FILE=$(aarch64_toolchain)
build/native-aarch64/.configured: $(aarch64_toolchain)

build/native-%/.configured: $(VENV)/.deps
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B $(@D) -G Ninja -DFT_PYTHON=OFF -DFT_TESTS=ON \
	  -DFT_WERROR=ON $(native_options) -DCMAKE_BUILD_TYPE=RelWithDebInfo
	touch $@

build/native-%/.tested: build/native-%/.configured $(native_sources) $(native_tests)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(@D) -j $(JOBS)
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir $(@D) --output-on-failure --no-tests=error
	touch $@

.PRECIOUS: build/native-%/.configured
.PHONY: help setup build demo test test-python tritons test-triton test-native test-emulated simde test-neon aarch64-tools lint stub format clean distclean

setup: $(VENV)/.deps   ## the virtual environment, without the package

build: $(VENV)/.installed   ## build and install the package into .venv

demo: build   ## fetch the demo model and generate text with it
	$(BIN)/ft demo

test: test-native test-python   ## every test

test-python: build tritons   ## the Python tests
	$(with_tritons) $(BIN)/python -m pytest $(PYTEST_ARGS)

test-triton: build tritons   ## the tests of the GPU kernels, interpreted, and compiled by two Tritons
	$(with_tritons) $(BIN)/python -m pytest $(PYTEST_ARGS) tests/kernels/triton

# The oldest Triton that kernels must compile with, and the newest, which also interprets them. Not in .venv: a
# PyTorch for CUDA brings its own, of exactly one version, and one for the CPU needs none.
with_tritons = PYTHONPATH=$(CURDIR)/$(newest_triton) FREETOKEN_OTHER_TRITON=$(CURDIR)/$(oldest_triton)
tritons: $(oldest_triton)/.installed $(newest_triton)/.installed
$(oldest_triton)/.installed $(newest_triton)/.installed: $(VENV)/.deps
	rm -rf $(@D)
	$(BIN)/python -m pip install $(PIP_ARGS) -q --no-deps --target $(@D) $(patsubst build/triton-%,triton==%,$(@D))
	touch $@

# Plain, with AddressSanitizer and UBSan, and (what has threads) with ThreadSanitizer.
test-native: build/native-plain/.tested build/native-address/.tested build/native-thread/.tested   ## the C++ tests

# The kernels of instruction sets that the host lacks, in plain C: right or wrong, but not as fast.
test-emulated: simde build/native-emulated/.tested   ## the C++ tests of AVX-VNNI and AVX-512, on a host with AVX2

simde:
	@echo '#include <simde/x86/avx512.h>' | $${CXX:-c++} -fsyntax-only -x c++ - 2>/dev/null || \
	  { echo "make test-emulated needs SIMDe; on Debian: apt-get install libsimde-dev" >&2; exit 1; }

test-neon: aarch64-tools build/native-aarch64/.tested   ## the C++ tests for AArch64, cross-compiled, under qemu

aarch64-tools:
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do \
	  command -v $$tool >/dev/null || { echo "make test-neon needs $$tool; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }; \
	done

lint: $(VENV)/.deps   ## ruff, format check, mypy --strict, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=python $(BIN)/lint-imports

stub: build   ## write the stub of the extension module anew
	$(BIN)/python -m nanobind.stubgen -q -m freetoken._native -o python/freetoken/_native.pyi

format: $(VENV)/.deps   ## rewrite the Python files in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:   ## remove what was built (keeps .venv)
	rm -rf build dist $(VENV)/.installed .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find python tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean   ## clean, and remove .venv too
	rm -rf $(VENV)

help:   ## this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1 | /' \
	  | awk -F'|' '{printf "%-20s%s\n", $$1, $$2}'
