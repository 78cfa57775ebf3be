#!/usr/bin/env bash
# Tests moxie.hf with several versions of transformers. Each gets an environment that shares the torch of BUILD/python. The tests
# convert a model of every family: what is left alone, and that Moxie computes each product of experts.
#
#   tools/families.sh [VERSION ...]     (default: 4.57.6 5.17.0 5.22.2)
#
# BUILD  folder of the builds (default: build); the environment of a version is BUILD/transformers-VERSION
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${BUILD:=build}" "${PRESET:=cpu}" "${PIP_ARGS:=}"
python=$(<"$BUILD/python")
versions=("$@")
[[ $# -gt 0 ]] || versions=(4.57.6 5.17.0 5.22.2)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
torch=$("$python" -c 'from importlib import metadata; print(metadata.version("torch"))')
library=${MOXIE_LIBRARY:-$PWD/$BUILD/$PRESET/moxie/torch/libmoxie_torch.so}

failed=0
for version in "${versions[@]}"; do
  env=$BUILD/transformers-$version
  if [[ ! -e $env/.done ]]; then
    "$python" -m venv --clear "$env"
    # ours.pth adds the packages of BUILD/python after the environment's own: torch and pytest come from there, transformers does
    # not.
    echo "$site" >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
    # shellcheck disable=SC2086
    "$env/bin/python" -m pip install -q --disable-pip-version-check $PIP_ARGS \
      -c <(echo "torch==$torch") "transformers==$version"
    touch "$env/.done"
  fi
  printf '== transformers %s\n' "$version"
  MOXIE_FAMILIES=all PYTHONPATH=python MOXIE_LIBRARY=$library \
    "$env/bin/python" -m pytest -q -rs tests/python/test_families.py || failed=1
done
exit "$failed"
