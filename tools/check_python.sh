#!/usr/bin/env bash
# Checks the Python sources as pyproject.toml says: ruff's formatting and rules, and the types of the
# package with mypy. --fix formats them and fixes what ruff can fix.
#
# Takes the linters that `tools/setup.sh --with-linters` installs, else those on the PATH. PYTHON is
# the interpreter whose torch mypy reads (default: the one that set-up chose).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PATH=$PWD/build/linters/bin:$PATH
: "${PYTHON:=$(cat build/python 2>/dev/null || command -v python3)}"
if [[ ${1:-} == --fix ]]; then
  ruff check --quiet --fix-only .
  ruff format --quiet .
  exit
fi

failed=0
ruff format --check . || failed=1
ruff check . || failed=1
mypy --python-executable "$PYTHON" || failed=1
exit "$failed"
