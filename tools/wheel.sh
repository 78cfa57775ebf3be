#!/usr/bin/env bash
# Builds a wheel for a named torch: `make wheel TORCH=torch==2.13.0 PYTHON=python3.11`. The wheel works
# with every Python, but only with the minor version of torch that it was built with, which its
# metadata requires, so it is put into dist/torch-<version>. Prints each file as it is compiled, and
# the wheel's path at the end.
#
# PYTHON    interpreter that makes the environment for the build (default: python3)
# TORCH     the torch that pip installs there (default: torch==2.13.0), and pip options if needed
# PIP_ARGS  options that are passed to every pip install
# CMAKE_ARGS  options of CMake, such as -DMOXIE_CUDA=ON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PYTHON:=python3}" "${TORCH:=torch==2.13.0}" "${PIP_ARGS:=}" "${CMAKE_ARGS:=}"

say() { printf 'wheel: %s\n' "$*"; }
die() { printf 'wheel: %s\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  die "PYTHON must be a Python of 3.10 or later, got '$PYTHON'"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
  die "$PYTHON makes no virtual environments; on Debian: apt-get install python3-venv"

name=$(tr -c 'a-zA-Z0-9.\n' - <<<"$(basename "$PYTHON")-$TORCH")
venv=$PWD/build/wheel/$name
if [[ ! -x $venv/bin/python || -e $venv/.unfinished ]]; then
  say "will make build/wheel/$name with $PYTHON, and install $TORCH there"
  mkdir -p "$venv"
  touch "$venv/.unfinished"
  "$PYTHON" -m venv --clear "$venv"
  touch "$venv/.unfinished"
  # shellcheck disable=SC2086  # lists of words
  "$venv/bin/python" -m pip install --disable-pip-version-check $PIP_ARGS $TORCH
  rm "$venv/.unfinished"
fi
torch=$("$venv/bin/python" -c 'from importlib import metadata; print(metadata.version("torch"))')
out=dist/torch-$torch
say "builds for torch $torch"
# shellcheck disable=SC2086
CMAKE_ARGS=$CMAKE_ARGS "$venv/bin/python" -m pip wheel --disable-pip-version-check $PIP_ARGS -v --no-deps -w "$out" .
say "pip install $(ls -t "$out"/moxie-*.whl | head -1)"
