"""Invalid offs never crash a process: a CPU refuses them, and a GPU repairs them and stays inside its buffers."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import moxie
from hostile_offs import GROUPS, KINDS, ROWS, Calls, in_line, offs_of
from support import as_tuple, assert_same_bytes

RECIPES = ["ops", *moxie.recipe_names()]
PROCESSES = min(12, os.cpu_count())  # processes at a time; each spends most of its time importing torch


def test_every_kind_of_offs_is_wrong():
    for name, kind in KINDS.items():
        for groups in GROUPS:
            ends = kind(groups)
            assert len(ends) == groups and ends != in_line(ends), f"{name}, {groups} groups"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cpu_refuses_wrong_offs_wherever_they_are_taken(recipe):
    for groups in (1, 5, 1024) if recipe == "ops" else (1, 5):
        calls = Calls("cpu", offs_of(in_line(KINDS["anything"](groups)), "cpu"))
        for name, call in calls.all(recipe):
            for kind, ends in KINDS.items():
                with pytest.raises(ValueError, match="offs must"):
                    call(offs_of(ends(groups), "cpu"))
                    print(f"{name} took {kind} offs of {groups} groups")
        calls.check_guards()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_calls_take_offs_that_are_right(recipe):
    good = offs_of(sorted(torch.randint(0, ROWS + 1, (5,)).tolist()), "cpu")
    calls = Calls("cpu", good)
    for name, call in calls.all(recipe):
        assert_same_bytes(as_tuple(call(good)), as_tuple(call(good.clone())), name)
    calls.check_guards()


@pytest.mark.skipif(not (torch.cuda.is_available() and moxie.has_cuda()), reason="no GPU")
def test_a_gpu_survives_wrong_offs_and_gives_what_ends_in_line_give():
    """Runs each recipe and kind of offs in a process of its own, because a broken CUDA context cannot be used again in the same
    process."""
    program = pathlib.Path(__file__).with_name("hostile_offs.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(recipe, kind):
        return subprocess.run([sys.executable, program, recipe, kind], env=environment, capture_output=True, text=True)

    jobs = [(recipe, kind) for recipe in RECIPES for kind in KINDS]
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        ended = list(pool.map(lambda job: run(*job), jobs))
    failed = [
        f"{recipe}, {kind} offs: {run.stdout.splitlines()[-1:]}\n{run.stderr[-1500:]}"
        for (recipe, kind), run in zip(jobs, ended)
        if run.returncode or not run.stdout.endswith("done\n")
    ]
    assert not failed, f"{len(failed)} of {len(jobs)} failed:\n" + "\n".join(failed)
