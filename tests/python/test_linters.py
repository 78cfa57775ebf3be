"""tools/check_format.sh, check_python.sh and check_tidy.sh fail on a planted fault, and pass without one."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PATH = os.pathsep.join((str(ROOT / "build/linters/bin"), os.environ["PATH"]))


def check(tool: str, needs: tuple[str, ...], folder: pathlib.Path, files: dict[str, str]) -> subprocess.CompletedProcess:
    """Makes a repository of `files` with this repository's linter settings, and runs a tool in it."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    for program in needs:
        if not shutil.which(program, path=PATH):
            pytest.skip(f"{program} is not installed; tools/setup.sh --with-linters")
    subprocess.run(["git", "init", "-q", folder], check=True)
    for name in (f"tools/{tool}", "pyproject.toml", ".clang-format", ".clang-tidy"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environ = {**os.environ, "PATH": PATH, "PYTHON": sys.executable, "MYPY_CACHE_DIR": str(folder.parent / "mypy")}
    return subprocess.run([folder / "tools" / tool], capture_output=True, text=True, env=environ)


# ---- Python ------------------------------------------------------------------------------------------------------------------

MODULE = '''"""A module."""


def double(x: int) -> int:
    return 2 * x
'''


def check_python(folder: pathlib.Path, text: str, name: str = "python/moxie/module.py") -> subprocess.CompletedProcess:
    files = {"python/moxie/__init__.py": "", name: text}
    return check("check_python.sh", ("ruff", "mypy"), folder, files)


def test_python_without_a_fault_passes(tmp_path):
    done = check_python(tmp_path, MODULE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text, message",
    (
        (MODULE.replace("2 * x", "2*x"), "python/moxie/module.py"),
        (MODULE.replace("2 * x", "2 * y"), "F821"),
        (MODULE.replace("2 * x", "str(x)"), "Incompatible return value type"),
        (MODULE.replace("x: int", "x: Optional[int]").replace("\n\n\ndef", "\n\nfrom typing import Optional\n\n\ndef"), "UP045"),
        (MODULE.replace("2 * x", "2 * x  # noqa: E731"), "RUF100"),
    ),
    ids=("a format", "a name", "a type", "an old spelling", "a suppression"),
)
def test_a_fault_in_python_is_found(text, message, tmp_path):
    done = check_python(tmp_path, text)
    assert done.returncode != 0 and message in done.stdout, done.stdout + done.stderr


def test_a_fault_in_a_script_is_found(tmp_path):
    done = check_python(tmp_path, MODULE.replace("2 * x", "2 * y"), name="bench/script.py")
    assert done.returncode != 0 and "bench/script.py" in done.stdout, done.stdout + done.stderr


# ---- C++ ---------------------------------------------------------------------------------------------------------------------

SOURCE = "int twice(const int* x) { return x ? 2 * *x : 0; }\n"


def check_tidy(folder: pathlib.Path, text: str) -> subprocess.CompletedProcess:
    command = {"directory": str(folder), "command": "c++ -std=c++20 -I. -c moxie/core/a.cc", "file": "moxie/core/a.cc"}
    files = {
        "moxie/core/a.h": text,
        "moxie/core/a.cc": '#include "moxie/core/a.h"\n',
        "build/cpu/compile_commands.json": json.dumps([command]),
    }
    return check("check_tidy.sh", ("clang-tidy",), folder, files)


def test_cpp_without_a_fault_passes(tmp_path):
    done = check_tidy(tmp_path, SOURCE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text, message",
    (
        ("double half(int x) { return x / 2; }\n", "bugprone-integer-division"),
        ("struct Count {\n  Count(int value);\n};\n", "google-explicit-constructor"),
        ("inline constexpr int limit = 3;\n", "readability-identifier-naming"),
    ),
    ids=("a lost fraction", "a conversion", "a name"),
)
def test_a_fault_in_a_header_of_core_is_found(text, message, tmp_path):
    done = check_tidy(tmp_path, text)
    assert done.returncode != 0 and message in done.stdout, done.stdout + done.stderr


def test_tidy_without_a_build_fails(tmp_path):
    done = check("check_tidy.sh", (), tmp_path, {})
    assert done.returncode != 0 and "build first" in done.stderr


@pytest.mark.parametrize("text, passes", ((SOURCE, True), (SOURCE.replace("2 * *x", "2**x"), False)))
def test_clang_format_finds_a_line_that_is_not_formatted(text, passes, tmp_path):
    done = check("check_format.sh", ("clang-format",), tmp_path, {"moxie/core/a.cc": text})
    assert (done.returncode == 0) == passes, done.stderr
