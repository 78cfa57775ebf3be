"""Runs test cases on several ranks, each a process. All cases of one world size share the same processes.

A case is a function, named module.function, that takes a World and raises on failure. `run` returns the errors of each case by
rank; the dict of a case that passed is empty.
"""

import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT = 900  # seconds; generous, so that a slow machine does not fail a test


@dataclasses.dataclass
class World:
    rank: int
    size: int
    folder: pathlib.Path  # a folder that all ranks share, empty at first


def environment() -> dict[str, str]:
    quiet = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # ranks may share a GPU
    }
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join([str(HERE), *(entry for entry in sys.path if entry)])}


def run(names: list[str], size: int, folder: pathlib.Path) -> dict[str, dict[int, str]]:
    """Runs the cases in order on `size` ranks. After the first failure the remaining cases are not run; they are reported as not
    reached."""
    (folder / "work").mkdir()
    commands = [[sys.executable, __file__, str(rank), str(size), str(folder), *names] for rank in range(size)]
    ranks = [
        subprocess.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    deadline, said = time.monotonic() + TIMEOUT, []
    try:
        for one in ranks:
            try:
                said.append(one.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                said.append("it did not end")
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
                one.wait()
    results: dict[str, dict[int, str]] = {name: {} for name in names}
    for rank in range(size):
        path = folder / f"result-{rank}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for name in names:
            text = found.get(name, f"not reached: {said[rank][-2000:]}")
            if text:
                results[name][rank] = text
    return results


def main(rank: int, size: int, folder: pathlib.Path, names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=300),
    )
    results: dict[str, str] = {}
    for name in names:
        started = time.monotonic()
        try:
            torch.manual_seed(0)
            module, _, function = name.rpartition(".")
            getattr(importlib.import_module(module), function)(World(rank, size, folder / "work"))
            dist.barrier()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        (folder / f"result-{rank}.json").write_text(json.dumps(results))
        if results[name]:
            print(results[name], flush=True)
            os._exit(1)  # exit at once: the other ranks then get a connection error instead of waiting for this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4:])
