"""Kills two ranks while they save checkpoints, several times, and checks that complete checkpoints stay valid.

    checkpoint_kills.py FOLDER KILLS SEED

torch is imported once, and ranks are forked from this process before it starts any threads.
"""

import os
import pathlib
import random
import signal
import sys
import time

import torch
import torch.distributed as dist

from moxie.distributed import checkpoint


def model_of(step: int) -> torch.nn.Linear:
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model


def save_forever(rank: int, folder: pathlib.Path, attempt: int, first: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=2)
    for step in range(first, first + 10000):
        checkpoint.save(folder / "run", step, model_of(step))


def main(folder: pathlib.Path, kills: int, seed: int) -> None:
    rng, last, ended_inside = random.Random(seed), -1, 0
    for attempt in range(kills):
        ranks = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                try:
                    save_forever(rank, folder, attempt, last + 1)
                finally:
                    os._exit(1)
            ranks.append(child)
        # Wait until the ranks have saved once, and then for a random time, so that the kill falls anywhere in a later save.
        deadline = time.monotonic() + 120
        while not any((folder / "run").glob(f"step-{last + 1:08d}/{checkpoint.MARKER}")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        for child in ranks:
            os.kill(child, signal.SIGKILL)
        for child in ranks:
            os.waitpid(child, 0)
        valid = checkpoint.steps(folder / "run")
        assert valid and valid[-1] > last, (valid, last)
        ended_inside += len(list((folder / "run").glob("step-*"))) > len(valid)
        model = model_of(-1)
        step, _ = checkpoint.load(folder / "run", model)
        assert step == valid[-1] and all((parameter == step).all() for parameter in model.parameters())
        last = step
    print(f"{kills} kills, {ended_inside} times with a save under way or left over; the last valid step is {last}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
