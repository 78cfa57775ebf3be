#!/usr/bin/env bash
# Prepares a machine for building and testing Moxie: prints what is missing, then installs it. If
# nothing is missing it changes nothing and needs no network. Writes the path of the interpreter that
# builds use to BUILD/python.
#
#   tools/setup.sh [--with-linters]
#
# --with-linters also installs what tools/check_*.sh run: clang-format and clang-tidy with apt, ruff
# and mypy into an environment of their own, BUILD/linters.
#
# PYTHON    interpreter to use, or to make VENV with (default: python3)
# TORCH     what to install when there is no torch that is new enough (default: torch==2.13.0); may
#           carry pip options of its own
# VENV      virtual environment (default: .venv); if it is given, it is used even if PYTHON has torch
# BUILD     folder for builds with that environment (default: build)
# PIP_ARGS  options that are passed to every pip install
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${PYTHON:=python3}" "${PIP_ARGS:=}" "${VENV:=.venv}" "${BUILD:=build}"
named_torch=${TORCH:-}
: "${TORCH:=torch==2.13.0}"
torchao=torchao==0.18.0       # tests compare with it, and skip without it
# Tests of moxie.hf need these, and skip without them. Exact versions, because models differ.
hugging_face="transformers==5.22.2 peft==0.21.2 accelerate==1.15.0"
linters=(ruff==0.17.5 mypy==2.4.1)  # exact: another version formats and warns differently
venv=$(realpath -ms "$VENV")
unfinished=$venv/.unfinished  # is there while packages are being installed
no_torchao=$venv/.no-torchao  # installing it failed once: not tried again
no_hugging_face=$venv/.no-hugging-face
with_linters=no
[[ ${1:-} != --with-linters ]] || with_linters=yes

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# ---- what the system lacks: each is tried, whatever package it may come from -------------------

compiler() { "${CXX:-c++}" -std=c++20 -x c++ "$@"; }

has_compiler() {
  compiler -fsyntax-only - 2>/dev/null <<'CC'
#include <bit>
#include <concepts>
#include <span>
static_assert(std::bit_cast<unsigned>(1.0f) == 0x3f800000 && std::integral<int>);
CC
}
has_linters() {
  local python=$BUILD/linters/bin/python
  [[ -x $python ]] && "$python" - "${linters[@]}" 2>/dev/null <<'PY'
import sys
from importlib import metadata
sys.exit(any(metadata.version(name) != version for name, version in (pin.split("==") for pin in sys.argv[1:])))
PY
}
has_header() { compiler -E - >/dev/null 2>&1 <<<"#include <$1>"; }
has_gtest() {
  has_header gtest/gtest.h && has_header gmock/gmock.h &&
    compiler - -lgmock -lgtest -lgtest_main -pthread -o /dev/null 2>/dev/null <<<'int main() {}'
}
has_cmake() {
  local version
  version=$(PATH=$venv/bin:$PATH cmake --version 2>/dev/null | sed -n '1s/.* //p')
  [[ -n $version && $(printf '%s\n' 3.25 "$version" | sort -V | head -1) == 3.25 ]]
}
has_python_headers() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
}

# Prints the Debian and Ubuntu packages that provide what is missing, one per line.
missing_packages() {
  has_compiler || echo g++
  command -v make >/dev/null || echo make
  has_cmake || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  has_gtest || printf '%s\n' libgtest-dev libgmock-dev
  has_header CLI/CLI.hpp || echo libcli11-dev
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  has_header xxhash.h || echo libxxhash-dev
  local base
  base=$(command -v "$python" || command -v "$PYTHON" || true)
  [[ -n $base ]] || echo python3
  if [[ $plan == create ]] && ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
    echo python3-venv
  fi
  # torch.compile needs Python's headers. Only the system's Python may lack them.
  base=$(readlink -f "${base:-/usr/bin/python3}")
  if [[ $base == /usr/bin/python3* ]] && ! has_python_headers "$base" 2>/dev/null; then
    echo python3-dev
  fi
  if [[ $with_linters == yes ]]; then
    command -v clang-format >/dev/null || echo clang-format
    command -v clang-tidy >/dev/null || echo clang-tidy
  fi
}

install_packages() {
  local -a as_root=()
  command -v apt-get >/dev/null ||
    die "there is no apt-get here; install these (Debian's names) and run again: $*"
  if [[ $EUID -ne 0 ]]; then
    if sudo -n true >/dev/null 2>&1; then
      as_root=(sudo -n)
    elif command -v sudo >/dev/null && [[ -t 0 ]]; then
      as_root=(sudo)
    else
      die "this needs root; as root, run: apt-get install $*"
    fi
  fi
  as_root+=(env DEBIAN_FRONTEND=noninteractive)
  "${as_root[@]}" dpkg --configure -a  # an interrupted installation blocks the next one
  "${as_root[@]}" apt-get update -q || say "apt-get update failed; going on with the lists at hand"
  "${as_root[@]}" apt-get install -q -y --no-install-recommends "$@" ||
    die "apt-get failed; install these and run again: $*"
}

# ---- which Python to use, and which packages it lacks ------------------------------------------

oldest=$(sed -n 's/^OLDEST = "\(.*\)".*/\1/p' python/moxie/_torch_versions.py)
newest=$(sed -n 's/^NEWEST = "\(.*\)".*/\1/p' python/moxie/_torch_versions.py)
is_at_most() { [[ $(printf '%s\n' "$1" "$2" | sort -V | head -1) == "$1" ]]; }
minor() { cut -d. -f1,2 <<<"$1"; }

# Prints three things about interpreter $1: its prefix; its version of torch, or "none" if it has
# none or too old a one; and each package that it lacks. Reads metadata only: importing torch takes
# seconds.
probe() {
  env -u PYTHONPATH "$1" - "$oldest" 2>/dev/null <<'PY' || true
import sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def minor(text):
    return tuple(int(n) for n in text.split(".")[:2])
torch = version("torch")
print(sys.prefix, torch if torch and minor(torch) >= minor(sys.argv[1]) else "none", sep="\n")
for name in ("pip", "numpy", "pytest", "matplotlib", "torchao", "transformers", "peft", "accelerate"):
    if not version(name):
        print(name)
PY
}
torch_of() { sed -n 2p <<<"$1"; }
has_torch() { [[ $(torch_of "$1") =~ ^[0-9] ]]; }
lacks() { sed 1,2d <<<"$1" | grep -qx "$2"; }

# $plan is one of: use       take PYTHON, which has torch
#                  complete  VENV exists; install what it lacks
#                  create    make VENV and install everything
python=$PYTHON
wanted=(numpy pytest)
state=$(probe "$python")
if [[ $venv == "$PWD/.venv" ]] && has_torch "$state" &&
  ! [[ $(head -1 <<<"$state") -ef $venv ]]; then
  plan=use
else
  python=$venv/bin/python
  wanted+=(matplotlib)
  state=$(probe "$python")
  plan=complete
  if [[ -e $unfinished || -z $state ]] || lacks "$state" pip; then
    plan=create
    state=$(printf '%s\n' "$venv" none "${wanted[@]}" torchao transformers)
  fi
fi

torch=
has_torch "$state" || torch=$TORCH
exact=$(sed -n 's/^torch==\([0-9.]*\)$/\1/p' <<<"$named_torch")
found=$(torch_of "$state")
if [[ $plan == complete && -n $exact && -z $torch && ${found%%+*} != "$exact" ]]; then
  die "${venv#"$PWD"/} holds torch $found, and TORCH is '$TORCH'; name another VENV, such as" \
    "VENV=.venv-$exact, or remove that one"
fi
pip_packages=()
for name in "${wanted[@]}"; do
  if lacks "$state" "$name"; then pip_packages+=("$name"); fi
done
# These go into our own environment only: a user's Python is not changed for tests that can be
# skipped.
if [[ $plan == use || -e $no_torchao ]] || ! lacks "$state" torchao; then torchao=; fi
if [[ $plan == use || -e $no_hugging_face ]] ||
  ! { lacks "$state" transformers || lacks "$state" peft || lacks "$state" accelerate; }; then
  hugging_face=
fi

# ---- say it, then do it ------------------------------------------------------------------------

mapfile -t packages < <(missing_packages)
# shellcheck disable=SC2206
from_pip=($torch "${pip_packages[@]}" $torchao $hugging_face)  # TORCH is a list of words
if [[ ${#packages[@]} -gt 0 ]]; then say "will install with apt: ${packages[*]}"; fi
if [[ $plan == create ]]; then say "will create the virtual environment ${venv#"$PWD"/}"; fi
if [[ ${#from_pip[@]} -gt 0 ]]; then
  say "will install with pip, for ${python#"$PWD"/}: ${from_pip[*]}"
fi
needs_linters=no
if [[ $with_linters == yes ]] && ! has_linters; then
  needs_linters=yes
  say "will install with pip, into $BUILD/linters: ${linters[*]}"
fi
if [[ ${#packages[@]} -eq 0 && ${#from_pip[@]} -eq 0 && $needs_linters == no ]]; then
  say "nothing is missing"
fi

if [[ ${#packages[@]} -gt 0 ]]; then
  install_packages "${packages[@]}"
  mapfile -t packages < <(missing_packages)
  if [[ ${packages[*]-} == cmake ]]; then
    say "apt's cmake is older than 3.25: will install it with pip too"
    pip_packages+=("cmake>=3.25")
  elif [[ ${#packages[@]} -gt 0 ]]; then
    die "still missing after apt-get install: ${packages[*]}"
  fi
fi

# shellcheck disable=SC2086
pip_install() { "$python" -m pip install --disable-pip-version-check $PIP_ARGS "$@"; }

if [[ $plan == create ]]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$PYTHON is $("$PYTHON" --version); 3.10 or later is needed (set PYTHON)"
  mkdir -p "$venv"
  touch "$unfinished"
  "$PYTHON" -m venv --clear "$venv"
fi
if [[ $plan != use && ${#from_pip[@]} -gt 0 ]]; then touch "$unfinished"; fi
# shellcheck disable=SC2086
if [[ -n $torch ]]; then pip_install $torch; fi
if [[ ${#pip_packages[@]} -gt 0 ]]; then
  pip_install "${pip_packages[@]}" ||
    die "pip failed; install these for $python and run again: ${pip_packages[*]}"
fi
if [[ -n $torchao ]] && ! pip_install --no-deps "$torchao"; then
  say "no $torchao: tests that compare with it skip (remove ${no_torchao#"$PWD"/} to try again)"
  touch "$no_torchao"
fi
if [[ -n $hugging_face ]]; then
  # These packages depend on torch. The constraint keeps pip from installing another one.
  torch_here=$(torch_of "$(probe "$python")")
  # shellcheck disable=SC2086
  if ! pip_install -c <(echo "torch==$torch_here") $hugging_face; then
    say "no $hugging_face: tests of moxie.hf skip (remove ${no_hugging_face#"$PWD"/} to try again)"
    touch "$no_hugging_face"
  fi
fi
rm -f "$unfinished"

if [[ $needs_linters == yes ]]; then
  "$python" -m venv --clear "$BUILD/linters"
  # shellcheck disable=SC2086
  "$BUILD/linters/bin/python" -m pip install --disable-pip-version-check $PIP_ARGS "${linters[@]}" ||
    die "pip failed to install the linters: ${linters[*]}"
fi

if [[ -n $torch ]]; then state=$(probe "$python"); fi
has_torch "$state" || die "$python has no torch $oldest or later (TORCH is '$TORCH')"
mkdir -p "$BUILD"
"$python" -c 'import sys; print(sys.executable)' >"$BUILD/python"
say "python is $(<"$BUILD/python"), torch is $(torch_of "$state")"
if ! is_at_most "$(minor "$(torch_of "$state")")" "$newest"; then
  say "Moxie is tested with torch $oldest to $newest, and this one is newer; going on with it"
fi
