"""The Python package itself: how it loads, what it exports, and that the examples in its docstrings work."""

import dataclasses
import doctest
import inspect
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import moxie
import moxie.ops
from moxie._torch_versions import NEWEST, OLDEST

PACKAGE = pathlib.Path(moxie.__file__).parent
EXPORTS = [value for name in moxie.__all__ if callable(value := getattr(moxie, name))]  # LM_SKIP is a constant


@pytest.mark.parametrize("target", [moxie, moxie.ops, *EXPORTS], ids=lambda target: target.__name__)
def test_docstring_snippets_run(target):
    module = target if inspect.ismodule(target) else inspect.getmodule(target)
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(target, module=module, globs={"torch": torch, "moxie": moxie, "dataclasses": dataclasses})
    runner = doctest.DocTestRunner()
    results = [runner.run(test) for test in tests]
    assert not any(result.failed for result in results)
    if not inspect.ismodule(target):
        assert any(result.attempted for result in results), "every function has a snippet"


def test_every_op_has_a_function_with_the_same_defaults():
    packets = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("moxie::") and not name.startswith("moxie::_")
    }
    assert packets <= set(moxie.__all__)
    for name in packets:
        schema = getattr(torch.ops.moxie, name).default._schema
        parameters = inspect.signature(getattr(moxie, name)).parameters
        assert [arg.name for arg in schema.arguments] == [p for p in parameters if p != "out"]
        for arg in schema.arguments:
            parameter = parameters[arg.name]
            assert (parameter.kind == parameter.KEYWORD_ONLY) == arg.kwarg_only
            if parameter.default is not parameter.empty and arg.name != "dtype":
                assert parameter.default == arg.default_value
        assert ("out" in parameters) == ("out" in getattr(torch.ops.moxie, name).overloads())


def import_with(code: str, **env: str) -> subprocess.CompletedProcess:
    """Runs `code` and then imports moxie, in a new Python process."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **env}
    return subprocess.run([sys.executable, "-c", f"{code}\nimport moxie"], env=env, text=True, capture_output=True)


def test_a_missing_library_says_where_it_was_looked_for_and_what_to_do():
    done = import_with("", MOXIE_LIBRARY="nowhere/libmoxie_torch.so")
    assert done.returncode != 0
    for part in ("ImportError", "nowhere/libmoxie_torch.so", "pip install .", "MOXIE_LIBRARY"):
        assert part in done.stderr


def test_a_library_that_does_not_load_says_so(tmp_path):
    broken = tmp_path / "libmoxie_torch.so"
    broken.write_bytes(b"not a library")
    done = import_with("", MOXIE_LIBRARY=str(broken))
    assert done.returncode != 0
    assert "ImportError" in done.stderr and "built for another torch" in done.stderr


@pytest.mark.parametrize("version", ("1.13.1", "2.9.1+cu128", "2.10.0"))
def test_a_torch_that_is_too_old_is_refused_by_name(version):
    done = import_with(f"import torch; torch.__version__ = {version!r}")
    assert done.returncode != 0
    assert f"moxie needs torch {OLDEST} or later, and found torch {version}" in done.stderr


@pytest.mark.parametrize("version", ("2.99.0", "2.100.0a0+git1234", "3.0.0"))
def test_a_torch_that_is_newer_than_tested_ones_is_used_with_a_warning(version):
    newer = f"import torch; torch.__version__ = {version!r}"
    done = import_with(newer)
    assert done.returncode == 0, done.stderr
    assert f"moxie is tested with torch {OLDEST} to {NEWEST}, and this is torch {version}" in done.stderr
    silenced = import_with(f"{newer}; import warnings; warnings.filterwarnings('ignore', message='moxie is tested')")
    assert silenced.returncode == 0 and not silenced.stderr


@pytest.mark.parametrize("version", (f"{OLDEST}.0", f"{NEWEST}.3+cu130"))
def test_a_torch_that_is_tested_gives_no_warning(version):
    done = import_with(f"import torch; torch.__version__ = {version!r}")
    assert done.returncode == 0 and not done.stderr


def test_documents_name_the_versions_that_are_checked():
    root = PACKAGE.parent.parent
    if not (root / "pyproject.toml").is_file():
        pytest.skip("not in the repository")
    readme = (root / "README.md").read_text()
    assert f"torch {OLDEST} to {NEWEST} " in readme and f"A torch of {OLDEST} or later" in readme


def test_cost_counts_each_byte_once():
    cost = torch.ops.moxie._cost
    rows, cols = 64, 96
    assert cost("quantize_rowwise", [rows, cols]) == [0, 2 * rows * cols, rows * cols + rows * 3]
    assert cost("quantize_rowwise", [rows, cols], dtype=torch.float32)[1] == 4 * rows * cols
    both = cost("quantize_both", [rows, cols], num_groups=2)
    # Colwise, 64 rows in two groups pad to at most 96, which is rounded up to 256.
    assert both[2] == rows * cols + rows * 3 + cols * (256 + 8)
    assert cost("quantize_both", [rows, cols])[1] == cost("quantize_rowwise", [rows, cols])[1]
    assert cost("pad_groups", [rows, cols], num_groups=4, alignment=16)[1:] == [2 * rows * cols, 2 * 128 * cols]
    assert cost("unpad_groups", [rows, cols], dtype=torch.uint8)[1:] == [rows * cols, rows * cols]
    with pytest.raises(ValueError, match="_cost: no cost is known of op 'sort'"):
        cost("sort", [rows, cols])
    with pytest.raises(ValueError, match="_cost: shape must have 2 or 3 sizes, got 1"):
        cost("quantize_both", [rows])


def default_of(argument):
    """Returns an argument's default as Python's inspect gives it."""
    if not argument.has_default_value():
        return inspect.Parameter.empty
    return argument.default_value


@pytest.mark.parametrize("name", sorted(name for name in moxie.__all__ if hasattr(torch.ops.moxie, name)))
def test_a_function_has_the_arguments_and_defaults_of_its_op(name):
    """An op's signature is defined by its schema. The Python function repeats it for readers and type checkers, and must
    agree."""
    schema = getattr(torch.ops.moxie, name).default._schema
    parameters = dict(inspect.signature(getattr(moxie, name)).parameters)
    parameters.pop("out", None)
    assert list(parameters) == [argument.name for argument in schema.arguments]
    for argument in schema.arguments:
        parameter = parameters[argument.name]
        assert (parameter.kind == inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        assert parameter.default == default_of(argument), argument.name
