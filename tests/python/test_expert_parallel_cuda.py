"""The symmetric engine between processes: the cases of expert_parallel_cuda_cases.py at 1, 2 and 4 ranks, which may share one
GPU, one start for each number of ranks."""

import functools

import pytest
import torch

import expert_parallel_cuda_cases
import ranks


def _can_run() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_gloo_available() and torch.cuda.is_available()


pytestmark = pytest.mark.skipif(not _can_run(), reason="no GPU, or this torch has no Gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    names = [f"expert_parallel_cuda_cases.{name}" for name in expert_parallel_cuda_cases.NAMES]
    return functools.cache(lambda size: ranks.run(names, size, tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("case", expert_parallel_cuda_cases.NAMES)
@pytest.mark.parametrize("size", (1, 2, 4))
def test_over_symmetric_memory(size, case, results):
    wrong = results(size)[f"expert_parallel_cuda_cases.{case}"]
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())
