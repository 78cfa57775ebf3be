#!/usr/bin/env bash
# Runs clang-tidy on moxie/core as .clang-tidy says, with the compiler commands of a build folder.
#
#   tools/check_tidy.sh [build folder (default: build/cpu)]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=${1:-build/cpu}
[[ -e $build/compile_commands.json ]] ||
  { echo "check_tidy: there is no $build/compile_commands.json; build first" >&2; exit 1; }
# The commands are meant for GCC: clang would complain about GCC's warning flags and attributes.
git ls-files -z --cached --others --exclude-standard -- 'moxie/core/*.cc' |
  xargs -0 -r -n 1 -P "${JOBS:-$(nproc)}" clang-tidy --quiet -p "$build" --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-attributes \
    2> >(grep -v ' warnings\? generated\.$' >&2)
