"""What all benchmarks share: options, clocks, the description of the machine, the report.

Import it before torch: oneDNN reads its instruction set from the environment once.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import pathlib
import platform
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

# oneDNN's AMX kernels die with SIGILL on virtual machines that lose the state of AMX tiles when they switch threads, so they are
# off. On other machines users may set the variable themselves: both sides of a comparison then use the same GEMMs.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

import moxie

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
WARM_UP = 2  # rounds that do not count
BURST_WARM_UP, BURST = 3, 8  # rounds of a burst
IDLE_SECONDS = 0.15  # pause before a burst, so that the GPU's clocks recover


def add_options(parser: argparse.ArgumentParser, repetitions: int = 15) -> None:
    has_cuda = torch.cuda.is_available() and moxie.has_cuda()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--quick", action="store_true", help="small shapes, 3 repetitions: a check, not a measurement")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file (default: under bench/results/<device>)")


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.device == "cuda" and not (torch.cuda.is_available() and moxie.has_cuda()):
        parser.error("there is no GPU, or the library was built without CUDA kernels")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.repetitions = 3
    torch.manual_seed(0)
    return options


def sizes_of(text: str) -> tuple[int, ...]:
    """Parses 2x3 as (2, 3). Returns () if the text is anything else than positive numbers and x."""
    sizes = text.split("x")
    return tuple(map(int, sizes)) if all(size.isdecimal() and int(size) > 0 for size in sizes) else ()


# ---- time --------------------------------------------------------------------------------------------------------------------


def laps(calls: list[Callable[[], object]], device: str) -> list[float]:
    """Runs the calls one after the other and returns the seconds of each."""
    if device == "cpu":
        times = [time.perf_counter()]
        for call in calls:
            call()
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:]):
        call()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def seconds_of(call: Callable[[], object], device: str) -> float:
    return laps([call], device)[0]


def burst(calls: list[Callable[[int], object]], warm_up: int = BURST_WARM_UP, timed: int = BURST) -> list[list[float]]:
    """Lets the GPU idle, then runs all calls in warm_up and timed rounds without a pause; returns seconds[round][call].

    The CPU launches ahead of the GPU, as in training, so times do not include launching.
    """
    torch.cuda.synchronize()
    time.sleep(IDLE_SECONDS)
    for i in range(warm_up):
        for call in calls:
            call(i)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)] for _ in range(timed)]
    for i, marks in enumerate(events):
        marks[0].record()
        for call, mark in zip(calls, marks[1:]):
            call(i)
            mark.record()
    torch.cuda.synchronize()
    return [[before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)] for marks in events]


def progress(done: int | None, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K" if done is None else f"\rround {done + 1} of {total}")
        sys.stderr.flush()


def rounds(repetitions: int):
    """Yields -WARM_UP .. repetitions - 1 and prints progress. Negative rounds are warm-up, and do not count."""
    for i in range(-WARM_UP, repetitions):
        progress(i + WARM_UP, repetitions + WARM_UP)
        yield i
    progress(None, 0)


def interleave(
    jobs: list[tuple[list[Callable[[int], object]], list]],
    repetitions: int,
    device: str,
    warm_up: int = BURST_WARM_UP,
    timed: int = BURST,
) -> None:
    """Runs each job once per round and appends the seconds of its calls to its list.

    Each round has a random order, so that no job always follows the same one.
    On a GPU a job's part of a round is a burst of `timed` repetitions.
    """
    rng = random.Random(0)
    if device == "cuda":
        bursts = math.ceil(repetitions / timed)
        for i in range(bursts):
            progress(i, bursts)
            for calls, seconds in rng.sample(jobs, len(jobs)):
                seconds += burst(calls, warm_up, timed)
        progress(None, 0)
        return
    for i in rounds(repetitions):
        for calls, seconds in rng.sample(jobs, len(jobs)):
            times = laps([functools.partial(call, i) for call in calls], device)
            if i >= 0:
                seconds.append(times)


def sustain(call: Callable[[int], object], seconds: float, device: str, quick: bool, warm_up: float = 2.0) -> float:
    """The mean time of a call in 1 s of calls, after warm_up s of them: by then a GPU at its power limit has lowered its clocks.

    seconds: about how long a call takes.
    """
    scale = 0.01 if quick else 1.0
    warm, timed = (max(math.ceil(scale * share / seconds), 1) for share in (warm_up, 1.0))

    def repeat(count: int) -> None:
        for i in range(count):
            call(i)

    return laps([lambda: repeat(warm), lambda: repeat(timed)], device)[1] / timed


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = lambda share: ordered[round(share * (len(ordered) - 1))]
    return {"median": statistics.median(ordered), "p10": at(0.1), "p90": at(0.9)}


# ---- report ------------------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def machine(device: str) -> dict:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if device == "cpu" and cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text())
        name = found[1].strip() if found else name
    return {
        "name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "onednn_max_isa": os.environ["ONEDNN_MAX_CPU_ISA"],
    }


def slug(machine: dict, device: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)|@.*", " ", machine["name"].lower())).strip("-")
    return name if device == "cuda" else f"{name}-{machine['threads']}-threads"


def begin_report(script: str, options: argparse.Namespace) -> dict:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD") or "unknown",
        "modified": bool(git("status", "--porcelain")),
        "command": shlex.join([script, *sys.argv[1:]]),
        "machine": machine(options.device),
        "repetitions": options.repetitions,
    }


def report_text(report: dict) -> str:
    """Formats a report as JSON with a line per field, and in lists of rows a line per row."""
    fields = []
    for name, value in report.items():
        text = json.dumps(value)
        if name in ("rows", "curves", "kernels"):
            text = "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def write_report(report: dict, options: argparse.Namespace, name: str) -> None:
    """Writes the report to the file of --out, by default bench/results/<device>/<name>.json."""
    path = options.out or RESULTS / slug(report["machine"], options.device) / (
        f"quick_{name}.json" if options.quick else f"{name}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_text(report))
    print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}\n")


def about(report: dict) -> str:
    machine = report["machine"]
    return f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}"


def text_table(lines: list[tuple[str, ...]], left: int) -> str:
    """Formats a text table. The first line is the head; the first `left` columns are left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = [
        " | ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    ]
    text.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join(text)
