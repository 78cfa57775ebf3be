# Thin on purpose: tools/setup.sh installs, CMake builds, tools/test.py tests.
PYTHON ?= python3
TORCH ?=
VENV ?= .venv
PIP_ARGS ?=
CMAKE_ARGS ?=
JOBS ?= $(shell nproc)
TEST_JOBS ?= 1
PRESET ?= $(shell PATH="$$PATH:/usr/local/cuda/bin"; \
  command -v nvcc >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)

PRESET := $(PRESET)
# An environment of another name has a build folder of its own, so that several stand side by side.
BUILD := build$(if $(filter-out .venv,$(VENV)),/$(patsubst .%,%,$(notdir $(VENV))))
python = $$(cat $(BUILD)/python)
in_build = PATH="$$(dirname "$(python)"):$$PATH"
library = $(CURDIR)/$(BUILD)/$(PRESET)/moxie/torch/libmoxie_torch.so
torch_version = $(shell sed -n 's/^$(1) = "\(.*\)".*/\1/p' python/moxie/_torch_versions.py)

.PHONY: help setup build test titan train wheel bench families format clean

help:
	@echo "make test     set up, build, run every test that can run here"
	@echo "make titan    set up, build, test inside TorchTitan, which gets environments of its own"
	@echo "make train    train a small model in bf16 and in MXFP8, and compare"
	@echo "make bench    set up, build, measure; prints tables and writes JSON"
	@echo "make wheel    build a wheel for TORCH and PYTHON, in dist/torch-<version>"
	@echo "make families train every family of transformers, tiny, and write the table of docs/HUGGING_FACE.md"
	@echo "make setup    install what is missing (says first what that is)"
	@echo "make build    set up and build"
	@echo "make format   format the C++, CUDA and Python sources in place"
	@echo "make clean    remove build/ (environments stay)"
	@echo
	@echo "PYTHON=$(PYTHON)  used as it is if it has torch $(call torch_version,OLDEST) or later; else VENV is made with it"
	@echo "TORCH='$(TORCH)'  what VENV gets (empty: as in tools/setup.sh); may carry pip options, such as another index"
	@echo "VENV=$(VENV)  the environment; one named otherwise has its own build folder (tested: torch $(call torch_version,OLDEST) to $(call torch_version,NEWEST))"
	@echo "PIP_ARGS='$(PIP_ARGS)'  options of every pip install"
	@echo "CMAKE_ARGS='$(CMAKE_ARGS)'  options of the configuration, such as -DMOXIE_WERROR=ON"
	@echo "JOBS=$(JOBS)  compiler processes at a time"
	@echo "TEST_JOBS=$(TEST_JOBS)  suites of tests at a time; with a GPU leave it at 1, they share its memory"
	@echo "PRESET=$(PRESET)  cuda where nvcc and a GPU are found, else cpu; see CMakePresets.json"

setup:
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' VENV='$(VENV)' BUILD='$(BUILD)' PIP_ARGS='$(PIP_ARGS)' tools/setup.sh

build: setup
	@$(in_build) cmake --preset $(PRESET) -B $(BUILD)/$(PRESET) -DPython3_EXECUTABLE="$(python)" $(CMAKE_ARGS) \
	  >$(BUILD)/$(PRESET).log || { cat $(BUILD)/$(PRESET).log; exit 1; }
	@$(in_build) cmake --build $(BUILD)/$(PRESET) -j $(JOBS)

test: build
	@$(in_build) "$(python)" tools/test.py -j $(TEST_JOBS) $(BUILD)/$(PRESET)

titan: build
	@PIP_ARGS='$(PIP_ARGS)' tools/titan.sh "$(python)" "$(library)" $(BUILD)

# Goes on where an earlier one was stopped.
train: build
	@MOXIE_PYTHON="$(python)" $(BUILD)/$(PRESET)/bin/moxie compare --out runs/make-train \
	  $$(if [ -e runs/make-train/plan.json ]; then echo --resume; \
	     else echo --preset tiny --recipes bf16 mxfp8_rceil_128 --seeds 2; fi)

wheel:
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' PIP_ARGS='$(PIP_ARGS)' CMAKE_ARGS='$(CMAKE_ARGS)' tools/wheel.sh

bench: build
	@for script in run grouped_mm moe sqnr; do \
	  PYTHONPATH=python MOXIE_LIBRARY="$(library)" "$(python)" bench/$$script.py || exit; \
	  echo; \
	done

families: build
	@BUILD='$(BUILD)' PRESET='$(PRESET)' PIP_ARGS='$(PIP_ARGS)' tools/families.sh
	@PYTHONPATH=python MOXIE_LIBRARY="$(library)" "$(python)" bench/families.py

format:
	@tools/setup.sh --with-linters
	@tools/check_format.sh --fix
	@tools/check_python.sh --fix

clean:
	rm -rf build
