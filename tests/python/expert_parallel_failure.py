"""A program for one rank of a group whose last rank is killed or stalls in the middle of a step. Each other rank prints the
exception it gets and after how many seconds.

python expert_parallel_failure.py RANK SIZE STORE TIMEOUT killed|stalled forward|backward
"""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import moxie.nn


def main() -> None:
    rank, size, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[4])
    how, where = sys.argv[5:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    torch.manual_seed(0)
    layer = moxie.nn.MoE(64, 64, 4 * size, 2, ep_group=dist.group.WORLD)
    x = torch.randn(8, 64, requires_grad=True)
    layer(x).sum().backward()  # a first step, which succeeds
    y = layer(x) if where == "backward" else None
    dist.barrier()
    if rank == size - 1:
        print("fails now", flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10 * timeout + 600)
    begin = time.monotonic()
    try:
        layer(x) if y is None else y.sum().backward()
    except RuntimeError as error:
        print(f"raised after {time.monotonic() - begin:.2f} s: {error}", flush=True)
        os._exit(7)
    os._exit(0)


if __name__ == "__main__":
    main()
