# Thin on purpose: tools/setup.sh installs, CMake builds, tools/test.py tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
CMAKE_ARGS ?=
JOBS ?= $(shell nproc)
PRESET ?= $(shell PATH="$$PATH:/usr/local/cuda/bin"; \
  command -v nvcc >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)

PRESET := $(PRESET)
python = $$(cat build/python)
in_build = PATH="$$(dirname "$(python)"):$$PATH"
library = $(CURDIR)/build/$(PRESET)/moxie/torch/libmoxie_torch.so

.PHONY: help setup build test train bench format clean

help:
	@echo "make test     set up, build, run every test that can run here"
	@echo "make train    train a small model in bf16 and in MXFP8, and compare"
	@echo "make bench    set up, build, measure; prints tables and writes JSON"
	@echo "make setup    install what is missing (says first what that is)"
	@echo "make build    set up and build"
	@echo "make format   format the C++ and CUDA sources in place"
	@echo "make clean    remove build/ (.venv stays)"
	@echo
	@echo "PYTHON=$(PYTHON)  used as it is if it has torch 2.11 to 2.13; else .venv is made with it"
	@echo "TORCH='$(TORCH)'  what .venv gets; may carry pip options, such as another index"
	@echo "PIP_ARGS='$(PIP_ARGS)'  options of every pip install"
	@echo "CMAKE_ARGS='$(CMAKE_ARGS)'  options of the configuration, such as -DMOXIE_WERROR=ON"
	@echo "JOBS=$(JOBS)  compiler processes at a time"
	@echo "PRESET=$(PRESET)  cuda where nvcc and a GPU are found, else cpu; see CMakePresets.json"

setup:
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' PIP_ARGS='$(PIP_ARGS)' tools/setup.sh

build: setup
	@$(in_build) cmake --preset $(PRESET) $(CMAKE_ARGS) >build/$(PRESET).log || \
	  { cat build/$(PRESET).log; exit 1; }
	@$(in_build) cmake --build build/$(PRESET) -j $(JOBS)

test: build
	@$(in_build) "$(python)" tools/test.py build/$(PRESET)

# Goes on where an earlier one was stopped.
train: build
	@MOXIE_PYTHON="$(python)" build/$(PRESET)/bin/moxie compare --out runs/make-train \
	  $$(if [ -e runs/make-train/plan.json ]; then echo --resume; \
	     else echo --preset tiny --recipes bf16 mxfp8_rceil_128 --seeds 2; fi)

bench: build
	@for script in run grouped_mm moe sqnr; do \
	  PYTHONPATH=python MOXIE_LIBRARY="$(library)" "$(python)" bench/$$script.py || exit; \
	  echo; \
	done

format:
	@tools/check_format.sh --fix

clean:
	rm -rf build
