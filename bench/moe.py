#!/usr/bin/env python3
"""Measures one MoE layer, forward + backward, against stock torch and SonicMoE: time, memory, time by kernel, growth.

    bench/moe.py [--shapes llama4 dsv3-8 4096x512x1024x16x2] [--rivals stock compiled sonic] [--recipes bf16 mxfp8_rceil_128]
                 [--growth tokens|experts] [--kernels] [--jobs 4] [--device cpu|cuda] [--quick] [--out file.json]

A shape has a name or is tokens x dim x hidden_dim x experts x top_k. Writes JSON after each shape, and prints a table of all
shapes at the end. bench/README.md describes the method.
"""

import argparse
import dataclasses
import functools
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator

import harness  # before torch

# isort: split
import torch

import moe_kernels
from apart import Child, in_batches, wait_for_turn
from moe_lines import CACHED, COMPILED, RIVALS, SONIC, STOCK, Line, Shape, lines_of, random_weights, stock_forward

NAMED = {
    "llama4": Shape(65536, 5120, 8192, 16, 1),
    "dsv3-8": Shape(65536, 7168, 2048, 8, 2),
    "dsv3-64": Shape(16384, 7168, 2048, 64, 8),
    "qwen3": Shape(32768, 2048, 768, 128, 8),
}
# SonicMoE's time relative to compiled stock torch, measured once on an H200; used if SonicMoE is not installed.
SONIC_OF_COMPILED = {"llama4": 1.02, "dsv3-8": 0.96, "dsv3-64": 0.99, "qwen3": 0.85}
SHAPES = {"cpu": ["4096x512x1024x16x2"], "cuda": list(NAMED)}
QUICK_SHAPES = {"cpu": ["256x64x128x4x2"], "cuda": ["8192x1024x512x8x2"]}
# On a GPU: a pause, one warm-up step, and few timed steps, so that the host runs ahead and clocks stay high.
BURST_WARM_UP, BURST = 1, 4
SUSTAINED_WARM_UP = 0.25  # seconds
MIB = 2**20


@dataclasses.dataclass
class Measured:
    line: Line
    difference: float = 0.0  # of y to stock torch's, relative norm
    saved: int | None = None  # bytes; None on a CPU
    peak: int | None = None
    seconds: list[list[float]] = dataclasses.field(default_factory=list)  # of each repetition: forward, backward
    sustained: float | None = None


# ---- how ---------------------------------------------------------------------------------------------------------------------


def calls_of(line: Line, x: torch.Tensor, dy: torch.Tensor) -> list[Callable[[int], object]]:
    """A call of forward, and one of backward on its result. Gradients are new in each step."""
    y = None

    def forward(_: int) -> None:
        nonlocal y
        for leaf in (x, *line.parameters):
            leaf.grad = None
        y = line.forward(x)

    def backward(_: int) -> None:
        nonlocal y
        y.backward(dy)
        y = None

    return [forward, backward]


def measure_memory(measured: Measured, lines: list[Line], x: torch.Tensor, dy: torch.Tensor) -> None:
    """saved: memory held between forward and backward besides x and y. peak: of a step, besides what was held before it."""
    forward, backward = calls_of(measured.line, x, dy)
    forward(0)
    backward(0)  # the first step may allocate permanent memory
    for line in lines:
        for leaf in (x, *line.parameters):
            leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(0)
    measured.saved = torch.cuda.memory_allocated() - before - dy.nbytes  # y is as large as dy
    backward(0)
    torch.cuda.synchronize()
    measured.peak = torch.cuda.max_memory_allocated() - before


def measure(shape: Shape, options: argparse.Namespace, name: str) -> "Result":
    """Returns rows of the report, the rivals that could not run, and time by kernel."""
    if options.device == "cuda":
        gc.collect()  # frees memory of the previous shape
        torch.cuda.empty_cache()
    make = {"device": options.device, "dtype": torch.bfloat16}
    weights = random_weights(shape, options.device)
    lines, missing = lines_of(shape, weights, options.rivals, options.recipes, variants=not options.growth)
    results = [Measured(line) for line in lines]
    x, dy = torch.randn(shape.tokens, shape.dim, **make, requires_grad=True), torch.randn(shape.tokens, shape.dim, **make)
    truth = stock_forward(x, weights, shape.top_k).detach().float()
    for one in results:  # with gradients, because torch would compile a second graph without
        one.difference = ((one.line.forward(x).detach().float() - truth).norm() / truth.norm()).item()
    del truth
    if options.child:
        for leaf in (x, *(leaf for line in lines for leaf in line.parameters)):
            leaf.grad = None
        if options.device == "cuda":
            torch.cuda.empty_cache()  # for the processes beside this one
        wait_for_turn()
    if options.device == "cuda":
        for one in results:
            measure_memory(one, lines, x, dy)
    steps = {one.line.name: calls_of(one.line, x, dy) for one in results}
    harness.interleave(
        [(steps[one.line.name], one.seconds) for one in results], options.repetitions, options.device, BURST_WARM_UP, BURST
    )
    kernels = []
    for one in results:
        step = lambda i, calls=steps[one.line.name]: [call(i) for call in calls]
        if not options.growth:
            one.sustained = harness.sustain(step, min(map(sum, one.seconds)), options.device, options.quick, SUSTAINED_WARM_UP)
        if options.kernels:
            kernels += [
                {"name": one.line.name, "shape": shape.sizes(), **row} for row in moe_kernels.profile(step, options.device)
            ]
    return rows_of(results, shape, name), missing, kernels


# ---- results -----------------------------------------------------------------------------------------------------------------


def best_rival(rows: list[dict], shape_name: str) -> dict | None:
    """The fastest of compiled stock torch and SonicMoE, burst and sustained; eager stock torch if neither was measured."""
    counted = [row for row in rows if row["name"] in (COMPILED, SONIC)] or [row for row in rows if row["name"] == STOCK]
    if not counted:
        return None
    fastest = lambda time, rivals: min((time(row), row["name"]) for row in rivals)
    times = {"burst": lambda row: row["seconds"]["median"]}
    if all("sustained_seconds" in row for row in counted):
        times["sustained"] = lambda row: row["sustained_seconds"]
    best = {protocol: fastest(time, counted) for protocol, time in times.items()}
    factor = SONIC_OF_COMPILED.get(shape_name)
    if factor and all(row["name"] == COMPILED for row in counted):
        stand_in = f"{SONIC}, taken as {factor} of {COMPILED}"
        best = {protocol: min((seconds, name), (factor * seconds, stand_in)) for protocol, (seconds, name) in best.items()}
    return best


def rows_of(results: list[Measured], shape: Shape, shape_name: str) -> list[dict]:
    rows = []
    for one in results:
        forward, backward = zip(*one.seconds)
        row = {
            "name": one.line.name,
            "shape_name": shape_name,
            "shape": shape.sizes(),
            "ours": one.line.ours,
            **({"way": one.line.way} if one.line.way else {}),
            "forward_seconds": harness.spread(forward),
            "backward_seconds": harness.spread(backward),
            "seconds": harness.spread([sum(laps) for laps in one.seconds]),
            "difference": one.difference,
        }
        if one.sustained is not None:
            row["sustained_seconds"] = one.sustained
        if one.saved is not None:
            row |= {"saved_mib": one.saved / MIB, "peak_mib": one.peak / MIB}
        rows.append(row)
    best = best_rival(rows, shape_name)
    for row in rows:
        if best and row["ours"]:
            seconds, row["best_rival"] = best["burst"]
            row["times_as_fast"] = seconds / row["seconds"]["median"]
            if "sustained" in best:
                seconds, row["sustained_best_rival"] = best["sustained"]
                row["sustained_times_as_fast"] = seconds / row["sustained_seconds"]
    return rows


def table(report: dict, rows: list[dict]) -> str:
    head = (
        "what",
        "shape",
        "forward ms",
        "backward ms",
        "total ms",
        "sustained ms",
        "best rival / this",
        "sustained",
        "saved MiB",
        "peak MiB",
        "y off stock",
    )
    lines = [head]
    for row in rows:
        number = lambda name, form, scale=1: format(scale * row[name], form) if name in row else ""  # noqa: B023
        times = [f"{row[part]['median'] * 1e3:.3f}" for part in ("forward_seconds", "backward_seconds", "seconds")]
        lines.append(
            (
                row["name"],
                row["shape_name"],
                *times,
                number("sustained_seconds", ".3f", 1e3),
                number("times_as_fast", ".2f"),
                number("sustained_times_as_fast", ".2f"),
                number("saved_mib", ".0f"),
                number("peak_mib", ".0f"),
                f"{row['difference']:.3f}",
            )
        )
    best = {row["shape_name"]: row["best_rival"] for row in rows if "best_rival" in row}
    notes = [f"{shape_name}: the best rival is {name}" for shape_name, name in best.items()]
    return "\n".join([f"{harness.about(report)}; median of {report['repetitions']}", *notes, harness.text_table(lines, left=2)])


def parse_shape(text: str) -> tuple[str, Shape]:
    if text in NAMED:
        return text, NAMED[text]
    sizes = harness.sizes_of(text)
    if len(sizes) != 5 or sizes[4] > sizes[3]:
        raise argparse.ArgumentTypeError(
            f"a shape is one of {', '.join(NAMED)}, or tokens x dim x hidden_dim x experts x top_k "
            f"with no larger top_k than experts, got {text}"
        )
    return text, Shape(*sizes)


def grown(base: Shape, growth: str, quick: bool) -> list[tuple[str, Shape]]:
    """1k to 256k tokens; or 1 to 256 experts with the total number of rows of base."""
    powers = range(0, 9, 8 if quick else 1)
    if growth == "tokens":
        shapes = [dataclasses.replace(base, tokens=(64 if quick else 1024) << power) for power in powers]
    else:
        shapes = [
            dataclasses.replace(
                base,
                experts=1 << power,
                top_k=min(base.top_k, 1 << power),
                tokens=base.tokens * base.top_k // min(base.top_k, 1 << power),
            )
            for power in powers
        ]
    return [("x".join(map(str, shape.sizes())), shape) for shape in shapes]


def default_rivals(options: argparse.Namespace) -> list[str]:
    """Not all rivals: torch.compile takes seconds per shape, and SonicMoE's kernels take seconds per number of experts."""
    if options.quick or options.device == "cpu":
        return ["stock"]
    return {None: ["stock", "compiled", "sonic"], "tokens": ["stock", "sonic"], "experts": ["stock"]}[options.growth]


Result = tuple[list[dict], dict[str, str], list[dict]]  # as measure() returns


def guarded(options: argparse.Namespace, named: tuple[str, Shape]) -> Result | None:
    """Measures a shape. Out of memory, or a failed kernel, is printed: the other shapes are kept."""
    name, shape = named
    try:
        return measure(shape, options, name)
    except RuntimeError:
        traceback.print_exc()
        return None


def apart(shapes: list[tuple[str, Shape]], options: argparse.Namespace) -> Iterator[Result | None]:
    """Measures each shape in a process of its own; options.jobs of them compile at the same time."""
    passed = ["--device", options.device, "--repetitions", str(options.repetitions), "--child"]
    passed += ["--rivals", *options.rivals, "--recipes", *options.recipes]
    passed += ["--kernels"] * options.kernels + ["--quick"] * options.quick
    start = lambda shape: functools.partial(Child, __file__, *passed, "--shapes", shape)
    for child in in_batches([start(name) for name, _ in shapes], options.jobs):
        try:
            yield json.loads(child.finish().strip().splitlines()[-1])
        except RuntimeError as error:
            print(error, file=sys.stderr)
            yield None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, repetitions=20)
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, help=f"{', '.join(NAMED)}, or tokens x dim x hidden_dim x experts x top_k"
    )
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, help="default: all on a GPU, and fewer with --growth or --quick")
    parser.add_argument("--recipes", nargs="*", default=["bf16", *CACHED], help="of Moxie's layer")
    parser.add_argument(
        "--growth", choices=("tokens", "experts"), help="1k to 256k tokens or 1 to 256 experts of the one shape (qwen3)"
    )
    parser.add_argument("--kernels", action="store_true", help="also the time of a step by kernel")
    parser.add_argument("--jobs", type=int, default=1, help="shapes that compile at the same time, each in its own process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # in the process of one shape
    options = harness.parse_options(parser)
    options.rivals = default_rivals(options) if options.rivals is None else options.rivals
    shapes = options.shapes or [parse_shape(text) for text in (QUICK_SHAPES if options.quick else SHAPES)[options.device]]
    if options.growth:
        base = options.shapes or (shapes if options.quick else [("qwen3", NAMED["qwen3"])])
        if len(base) != 1:
            parser.error("--growth takes one shape")
        shapes = grown(base[0][1], options.growth, options.quick)
        options.repetitions = min(options.repetitions, 2 * BURST)
    report = harness.begin_report("bench/moe.py", options) | {"missing": {}, "rows": [], "kernels": []}
    failed = False
    for measured in apart(shapes, options) if options.jobs > 1 else map(functools.partial(guarded, options), shapes):
        failed |= measured is None
        rows, missing, kernels = measured or ([], {}, [])
        report["rows"] += rows
        report["missing"] |= missing
        report["kernels"] += kernels
        if options.child:
            print(json.dumps(measured))
            return 1 if failed else 0
        harness.write_report(report, options, f"moe_{options.growth}" if options.growth else "moe")
        if len(shapes) > 1 and rows:
            print(table(report, rows) + "\n", flush=True)
    if report["kernels"]:
        print(moe_kernels.table(report["kernels"]) + "\n")
    for name, reason in report["missing"].items():
        print(f"{name} was not measured: {reason}\n")
    print(table(report, report["rows"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
