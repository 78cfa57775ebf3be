#!/usr/bin/env bash
# Tests moxie.torchtitan. For each version of TorchTitan it makes an environment that shares the torch
# of the build's Python, installs TorchTitan there, and runs moxie's tests for it.
#
#   tools/titan.sh PYTHON LIBRARY FOLDER      environments are FOLDER/titan-<version>
#
# PIP_ARGS  options that are passed to every pip install
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1 library=$2 folder=$3
: "${PIP_ARGS:=}"
shared=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
torch=$("$python" -c 'import torch; print(torch.__version__.partition("+")[0])')

for version in 0.3.0 0.2.2; do
  venv=$folder/titan-$version
  if [[ ! -e $venv/complete ]]; then
    printf 'titan: will install torchtitan==%s and triton with pip, into %s\n' "$version" "$venv"
    "$python" -m venv --clear --without-pip "$venv"
    "$venv/bin/python" -c 'import sys, sysconfig
open(sysconfig.get_path("purelib") + "/shared.pth", "w").write(sys.argv[1] + "\n")' "$shared"
    # TorchTitan's dependencies require torch: the constraint keeps the shared one. TorchTitan imports triton, which a torch for
    # CPUs does not install.
    printf 'torch==%s\n' "$torch" >"$venv/constraints"
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install -q --disable-pip-version-check $PIP_ARGS -c "$venv/constraints" \
      "torchtitan==$version" triton
    touch "$venv/complete"
  fi
  printf 'titan: torchtitan %s, torch %s\n' "$version" "$torch"
  PYTHONPATH=python MOXIE_LIBRARY=$library "$venv/bin/python" -m pytest -rs -s -q \
    tests/python/test_torchtitan.py tests/python/test_torchtitan_02.py
done
