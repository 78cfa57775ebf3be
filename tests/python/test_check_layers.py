"""tools/check_layers.py fails if a lower layer includes a higher one."""

import pathlib
import shutil
import subprocess
import sys

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools/check_layers.py"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed, and the check asks it for the files")


def check(folder: pathlib.Path, files: dict[str, list[str]]) -> subprocess.CompletedProcess:
    """Runs check_layers.py over a made-up repository. `files` maps each header to the headers that it includes."""
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "tools").mkdir()
    shutil.copy(TOOL, folder / "tools")
    for name, included in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'#include "{other}"\n' for other in included))
    return subprocess.run([sys.executable, folder / "tools/check_layers.py"], capture_output=True, text=True)


def test_arrows_that_point_one_way_pass(tmp_path):
    done = check(
        tmp_path,
        {
            "moxie/core/base/a.h": [],
            "moxie/core/gemm/b.h": ["moxie/core/base/a.h"],
            "moxie/torch/view.h": ["moxie/core/gemm/b.h"],
            "moxie/torch/ops/c.cc": ["moxie/torch/view.h"],
        },
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("layer", ("core", "torch"))
def test_a_circle_of_rooms_is_found_in_however_many_steps(layer, tmp_path):
    done = check(
        tmp_path,
        {
            f"moxie/{layer}/one/a.h": [f"moxie/{layer}/two/b.h"],
            f"moxie/{layer}/two/b.h": [],
            f"moxie/{layer}/two/c.h": [f"moxie/{layer}/three/d.h"],
            f"moxie/{layer}/three/d.h": [f"moxie/{layer}/one/e.h"],
            f"moxie/{layer}/one/e.h": [],
        },
    )
    assert done.returncode == 1
    assert f"moxie/{layer}/one -> moxie/{layer}/two -> moxie/{layer}/three -> moxie/{layer}/one" in done.stdout


@pytest.mark.parametrize(
    "file, included, rule",
    (
        ("moxie/torch/gemm/a.cc", "moxie/torch/ops.h", "is below the dispatcher"),
        ("moxie/core/base/a.h", "moxie/core/gemm/b.h", "moxie/core/base includes of core only base"),
        ("moxie/core/gemm/a.h", "moxie/torch/view.h", "includes nothing of the layers above it"),
        ("moxie/torch/a.h", "moxie/cli/b.h", "moxie/torch does not include moxie/cli"),
    ),
)
def test_an_arrow_that_points_up_is_found(file, included, rule, tmp_path):
    done = check(tmp_path, {file: [included]})
    assert done.returncode == 1 and rule in done.stdout


def test_two_headers_of_core_with_one_name_are_found(tmp_path):
    done = check(
        tmp_path,
        {
            "moxie/core/gemm/tile.cuh": [],
            "moxie/core/quantize/tile.cuh": [],
            "moxie/core/gemm/backends.h": [],
            "moxie/core/quantize/backends.h": [],
        },
    )
    assert done.returncode == 1
    assert "moxie/core/quantize/tile.cuh:1: moxie/core/gemm/tile.cuh has the same file name" in done.stdout
    assert "1 broken rules" in done.stdout
