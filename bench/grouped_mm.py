#!/usr/bin/env python3
"""Measures forward and backward of grouped_mm beside torch's bf16 grouped product and torchao's emulated MXFP8.

    bench/grouped_mm.py [--shape 2048x1024x1024x8] [--recipes mxfp8_rceil_128] [--device cpu|cuda] [--quick] [--out file.json]

A shape is MxNxKxG: x [M, K], w [G, N, K]. Prints a table last, and writes JSON. bench/README.md says how it measures.
"""

import argparse
import dataclasses
import random
import sys
from collections.abc import Callable

import harness  # before torch
import torch

import moxie

BASELINE = "torch bf16"
SHAPES = {
    "cpu": ["2048x1024x1024x8"],
    "cuda": ["131072x8192x5120x8", "131072x2048x7168x8", "32768x2048x7168x8", "131072x2048x7168x32"],
}
QUICK_SHAPES = {"cpu": ["256x128x256x4"], "cuda": ["8192x1024x2048x8"]}
NUM_BUFFERS = 2  # sets of inputs that take turns


@dataclasses.dataclass
class Bench:
    """One line of the table. forward(x, w) of buffers[i % NUM_BUFFERS] is the i-th repetition."""

    name: str
    groups: str
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    seconds: list[list[float]] = dataclasses.field(default_factory=list)  # of each repetition: forward, backward


# ---- what is measured --------------------------------------------------------------------------------------------------------


def ragged_sizes(rows: int, groups: int) -> list[int]:
    """Random sizes from half to one and a half times the mean, none a multiple of 8; they add up to rows."""
    rng = random.Random(rows * groups)
    shares = [rng.uniform(0.5, 1.5) for _ in range(groups)]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    largest = sizes.index(max(sizes))
    others = [g for g in range(groups) if g != largest]
    for g in others:
        sizes[g] += sizes[g] % 8 == 0
    sizes[largest] = rows - sum(sizes[g] for g in others)
    if sizes[largest] % 8 == 0 and others:
        step = 1 if sizes[others[0]] % 8 < 7 else -1
        sizes[others[0]] += step
        sizes[largest] -= step
    return sizes


def aligned_sizes(rows: int, groups: int, alignment: int = 32) -> list[int]:
    """The ragged sizes, each rounded to the alignment, with what that changes in the largest."""
    ragged = ragged_sizes(rows, groups)
    sizes = [max(round(size / alignment), 1) * alignment for size in ragged]
    sizes[ragged.index(max(ragged))] += rows - sum(sizes)
    return sizes


def offs_of(sizes: list[int], device: str) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(device=device, dtype=torch.int32)


def torchao_forward(offs: torch.Tensor) -> Callable | None:
    try:
        from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao
        from torchao.quantization.quantize_.common import KernelPreference
    except ImportError:
        return None
    return lambda x, w: torchao._to_mxfp8_then_scaled_grouped_mm(
        x, w.mT, offs=offs, kernel_preference=KernelPreference.EMULATED)


def benches_of(rows: int, groups: int, device: str, recipes: list[str]) -> list[Bench]:
    offs = offs_of(ragged_sizes(rows, groups), device)
    benches = [Bench(BASELINE, "ragged", lambda x, w: torch._grouped_mm(x, w.mT, offs=offs))]
    for recipe in recipes:
        benches.append(Bench(recipe, "ragged", lambda x, w, recipe=recipe: moxie.grouped_mm(x, w, offs, recipe=recipe)))
    # torchao takes no other groups than aligned ones; on a GPU its emulation is left out.
    aligned = aligned_sizes(rows, groups)
    if device == "cpu" and rows % 32 == 0 and min(aligned) > 0:
        forward = torchao_forward(offs_of(aligned, device))
        if forward:
            benches.append(Bench("torchao mxfp8 emulated", "multiples of 32", forward))
    return benches


def buffers_of(shape: tuple[int, ...], device: str) -> list[tuple[torch.Tensor, ...]]:
    """x, w, dy; random values, never zeros."""
    rows, n, k, groups = shape
    random_of = lambda *sizes: torch.randn(*sizes, device=device).to(torch.bfloat16)  # noqa: E731
    return [(random_of(rows, k).requires_grad_(), (random_of(groups, n, k) * k**-0.5).requires_grad_(), random_of(rows, n))
            for _ in range(NUM_BUFFERS)]


# ---- how ---------------------------------------------------------------------------------------------------------------------


def step(bench: Bench, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, device: str) -> list[float]:
    """Weights are quantized anew: no cache is given."""
    results = []
    forward = lambda: results.append(bench.forward(x, w))  # noqa: E731
    backward = lambda: results.append(torch.autograd.grad(results[0], (x, w), dy))  # noqa: E731
    return harness.laps([forward, backward], device)


def measure(benches: list[Bench], shape: tuple[int, ...], repetitions: int, device: str) -> None:
    """A round has each bench once, in an order of its own, so that none always follows the same one."""
    buffers = buffers_of(shape, device)
    rng = random.Random(0)
    for i in harness.rounds(repetitions):
        for bench in rng.sample(benches, len(benches)):
            seconds = step(bench, *buffers[i % NUM_BUFFERS], device)
            if i >= 0:
                bench.seconds.append(seconds)


# ---- results -----------------------------------------------------------------------------------------------------------------


def rows_of(benches: list[Bench], shape: tuple[int, ...]) -> list[dict]:
    rows = []
    for bench in benches:
        forward, backward = zip(*bench.seconds)
        total = [sum(seconds) for seconds in bench.seconds]
        rows.append({"name": bench.name, "shape": list(shape), "groups": bench.groups,
                     "forward_seconds": harness.spread(forward), "backward_seconds": harness.spread(backward),
                     "seconds": harness.spread(total)})
    baseline = rows[0]["seconds"]["median"]
    for row in rows:
        row["times_bf16"] = row["seconds"]["median"] / baseline
    return rows


def table(report: dict) -> str:
    lines = [("what", "M x N x K x G", "groups", "forward ms", "backward ms", "total ms", "x bf16")]
    for row in report["rows"]:
        ms = [f"{row[part]['median'] * 1e3:.3f}" for part in ("forward_seconds", "backward_seconds", "seconds")]
        lines.append((row["name"], "x".join(map(str, row["shape"])), row["groups"], *ms, f"{row['times_bf16']:.2f}"))
    return (f"{harness.about(report)}, oneDNN up to {report['machine']['onednn_max_isa']}; median of "
            f"{report['repetitions']}; w quantized in every step\n{harness.text_table(lines, left=3)}")


def parse_shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 4 or min(sizes) < 1 or sizes[0] < 16 * sizes[3]:
        raise argparse.ArgumentTypeError(f"a shape is MxNxKxG with at least 16 rows per group, got {text}")
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_options(parser)
    parser.add_argument("--shape", nargs="+", type=parse_shape, help="MxNxKxG: x [M, K], w [G, N, K]")
    parser.add_argument("--recipes", nargs="+", help="default: every one whose numerics differ")
    options = harness.parse_options(parser)
    recipes = options.recipes or [name for name in moxie.recipe_names() if "emulated" not in name]
    shapes = options.shape or [
        parse_shape(text) for text in (QUICK_SHAPES if options.quick else SHAPES)[options.device]]
    report = harness.begin_report("bench/grouped_mm.py", options) | {"rows": []}
    for shape in shapes:
        benches = benches_of(shape[0], shape[3], options.device, recipes)
        measure(benches, shape, options.repetitions, options.device)
        report["rows"] += rows_of(benches, shape)
    harness.write_report(report, options, "grouped_mm")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
