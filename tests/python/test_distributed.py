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
            done[size] = ranks.run(cases(), size, tmp_path_factory.mktemp(f"ranks{size}"))
        return done[size]

    return of


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name", cases())
def test_sharded(results, name, size):
    wrong = results(size)[name]
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())


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
