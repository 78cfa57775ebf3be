"""Sharded models on 2 and 4 ranks, and one test on 8: FSDP2, tensor parallelism, both together, and checkpoints.

The cases are functions in the *_cases.py modules. All cases for one number of ranks run in the same processes, which start once.
"""

import doctest
import inspect
import pathlib
import subprocess
import sys

import pytest
import torch

import checkpoint_cases
import distributed_cases
import misuse_cases
import moxie
import ranks
import sharded_ep_cases
import sharded_training_cases
from moxie.distributed import checkpoint

MODULES = (distributed_cases, sharded_training_cases, checkpoint_cases, sharded_ep_cases, misuse_cases)

# These shard w13 by gate_up_shard(), to which torch 2.11 cannot redistribute.
STRIDED = (
    "distributed_cases.experts_are_sharded_by_their_hidden_features",
    "distributed_cases.fsdp_over_tensor_parallelism",
    "distributed_cases.a_layer_takes_dtensors_without_a_style",
    "sharded_training_cases.ten_steps_of_tensor_parallelism",
    "sharded_training_cases.ten_steps_of_fsdp_over_tensor_parallelism",
    "checkpoint_cases.checkpoints_move_between_world_sizes_and_meshes",
    "sharded_ep_cases.gradients_on_a_mesh_are_those_of_the_same_splits_in_one_process",
    "sharded_ep_cases.ten_steps_on_a_mesh",
    "sharded_ep_cases.experts_of_a_group_under_tensor_parallelism",
    "sharded_ep_cases.checkpoints_of_experts_of_a_group",
    "misuse_cases.misuse_is_an_error_on_every_rank",
)
HAS_STRIDED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
needs_strided = pytest.mark.skipif(not HAS_STRIDED, reason="this torch cannot redistribute to gate_up_shard()")


def cases() -> list[str]:
    return [
        f"{module.__name__}.{name}"
        for module in MODULES
        for name, one in inspect.getmembers(module, inspect.isfunction)
        if one.__module__ == module.__name__ and list(inspect.signature(one).parameters) == ["world"]
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    done: dict[int, dict] = {}

    def of(size: int) -> dict:
        if size not in done:
            names = [name for name in cases() if HAS_STRIDED or name not in STRIDED]
            done[size] = ranks.run(names, size, tmp_path_factory.mktemp(f"ranks{size}"))
        return done[size]

    return of


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_strided) if name in STRIDED else name for name in cases()])
def test_sharded(results, name, size):
    wrong = results(size)[name]
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())


@needs_strided
def test_fsdp_over_experts_of_a_group_and_tensor_parallelism_on_eight_ranks(tmp_path):
    """A mesh of 2 x 2 x 2. Ranks of dp hold other shards of the same experts: with fewer ranks one of the three has size 1."""
    names = [
        f"sharded_ep_cases.{one.__name__}"
        for one in (
            sharded_ep_cases.gradients_on_a_mesh_are_those_of_the_same_splits_in_one_process,
            sharded_ep_cases.ten_steps_on_a_mesh,
        )
    ]
    wrong = ranks.run(names, 8, tmp_path)
    assert not any(wrong.values()), wrong


def test_a_save_that_is_killed_leaves_the_last_valid_one_in_force(tmp_path):
    script = pathlib.Path(__file__).with_name("checkpoint_kills.py")
    command = [sys.executable, str(script), str(tmp_path), "10", "1"]
    done = subprocess.run(command, env=ranks.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0 and "10 kills" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ("save", "load", "steps"))
def test_docstrings_of_checkpoints_run(name, tmp_path):
    target = getattr(checkpoint, name)
    names = {"torch": torch, "moxie": moxie, "folder": tmp_path}
    results = [doctest.DocTestRunner().run(test) for test in doctest.DocTestFinder().find(target, globs=names)]
    assert all(result.attempted and not result.failed for result in results)
