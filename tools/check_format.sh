#!/usr/bin/env bash
# Checks that C++ and CUDA sources are formatted as .clang-format says. With --fix it formats them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=(--dry-run -Werror)
[[ ${1:-} != --fix ]] || mode=(-i)
git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cc' '*.inc' '*.cu' '*.cuh' |
  xargs -0 -r clang-format --style=file "${mode[@]}"
