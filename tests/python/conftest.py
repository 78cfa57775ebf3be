"""Finds the package, and runs each test that takes `device` on every device there is."""

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# `make test` says which package and library to use. A plain `pytest` in a checkout takes the newest build. (Seen from the
# root of the repository the C++ folder moxie/ is a namespace package, which has no origin.)
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


# Nearly all tensors here are tiny, and threads that wait for each other cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of `moxie train` that nothing interrupted: run/ and weights.safetensors."""
    folder = tmp_path_factory.mktemp("finished")
    program.train(folder / "run", save_weights=folder / "weights.safetensors", stats_every=2)
    return folder


@pytest.fixture
def sm100():
    """Every call takes the Blackwell path; gives the dims of the second operand of each product."""
    with pretended_gpu("sm100", stand_in) as calls:
        yield calls
