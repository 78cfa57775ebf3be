"""Finds the moxie package to test, and runs each test that takes `device` on every available device."""

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# `make test` sets the package and library to use. A plain `pytest` in a checkout uses the newest build. (In the root of the
# repository Python takes the C++ folder moxie/ for a namespace package; its spec has no origin.)
spec = importlib.util.find_spec("moxie")
if spec is None or spec.origin is None:
    sys.path.insert(0, str(ROOT / "python"))
    builds = sorted(ROOT.glob("build/*/moxie/torch/libmoxie_torch.so"), key=lambda path: path.stat().st_mtime)
    if builds:
        os.environ.setdefault("MOXIE_LIBRARY", str(builds[-1]))

# oneDNN's AMX kernels die with SIGILL in virtual machines that lose tile state at a context switch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

import moxie
import program
from blackwell import stand_in
from grouped_reference import pretended_gpu

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and moxie.has_cuda() else [])


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


# Nearly all tensors in the tests are tiny, so more threads would only make the tests slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the result of one uninterrupted `moxie train`: run/ and weights.safetensors."""
    folder = tmp_path_factory.mktemp("finished")
    program.train(folder / "run", save_weights=folder / "weights.safetensors", stats_every=2)
    return folder


@pytest.fixture
def sm100():
    """Plans every call as for a Blackwell GPU (sm100), with a stand-in for torch's product. Yields a list to which each product
    appends the number of dims of its second operand."""
    with pretended_gpu("sm100", stand_in) as calls:
        yield calls
