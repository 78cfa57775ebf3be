"""Profiles a step and sums its time by kernel, for bench/moe.py --kernels."""

import re
from collections.abc import Callable

import harness  # before torch

# isort: split
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

STEPS = 3
WIDTH = 100  # most characters of a kernel's name in the table
SMALLEST_SHARE = 0.005  # kernels with a smaller share of the step are one line
NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|moxie::")


def profile(step: Callable[[int], object], device: str) -> list[dict]:
    """Launches and seconds per step of each kernel (on a CPU: of each op), the longest first."""
    on_gpu = device == "cuda"
    step(0)
    if on_gpu:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for i in range(STEPS):
            step(i)
        if on_gpu:
            torch.cuda.synchronize()
    rows = []
    for event in profiler.key_averages():
        # A compiled graph also has an event for its whole span on the GPU, which would count its kernels twice.
        if event.device_type != (DeviceType.CUDA if on_gpu else DeviceType.CPU) or getattr(event, "is_user_annotation", False):
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            rows.append(
                {"kernel": NOISE.sub("", event.key), "launches": event.count / STEPS, "seconds": microseconds / STEPS / 1e6}
            )
    rows.sort(key=lambda row: -row["seconds"])
    total = sum(row["seconds"] for row in rows)
    small = [row for row in rows if row["seconds"] < SMALLEST_SHARE * total]
    rows = rows[: len(rows) - len(small)]
    if small:
        rows.append(
            {
                "kernel": f"{len(small)} others",
                "launches": sum(row["launches"] for row in small),
                "seconds": sum(row["seconds"] for row in small),
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    totals: dict[tuple, float] = {}
    for row in rows:
        key = (row["name"], *row["shape"])
        totals[key] = totals.get(key, 0.0) + row["seconds"]
    lines = [("what", "shape", "kernel", "launches", "ms", "share")]
    for row in rows:
        lines.append(
            (
                row["name"],
                "x".join(map(str, row["shape"])),
                row["kernel"][:WIDTH],
                f"{row['launches']:.0f}",
                f"{row['seconds'] * 1e3:.3f}",
                f"{row['seconds'] / totals[(row['name'], *row['shape'])]:.1%}",
            )
        )
    return harness.text_table(lines, left=3)
