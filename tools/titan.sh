#!/usr/bin/env bash
# Tests moxie.torchtitan: for each version of TorchTitan, makes an environment that shares the torch of
# the build's Python, installs TorchTitan into it, and runs its tests.
#
#   tools/titan.sh PYTHON LIBRARY FOLDER      FOLDER gets the environments, titan-<version>
#
# PIP_ARGS  options of every pip install
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
    # TorchTitan names no torch, but what it needs does. TorchTitan imports triton, which a torch for CPUs does not bring.
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
