#!/usr/bin/env python3
"""Measures the router of the MoE layer, forward + backward, against the time of its bytes and its FLOPs.

    bench/router.py [--shapes llama4 dsv3-8 4096x512x1024x16x2] [--device cpu|cuda] [--quick] [--out file.json]

Two lines per shape: the logits (`gate_logits` and its gradients), and the choice (scores, top-k, weights, counts, and their
gradient). Shapes are those of bench/moe.py; x and the gate's weight are bf16. On a GPU a step is captured in a CUDA graph, so
launches are not in its time. The bound of the logits is the larger of their bytes at the speed of a copy in the same run (x is
read twice, dx written once), and their FLOPs at 600 TFLOPS (every term of a split factor counts). Prints a table, writes JSON.
"""

import argparse
import sys
from collections.abc import Callable

import harness  # before torch

# isort: split
import torch

import moe
import moxie
from moe_lines import Shape

COPY_BYTES = 2**30
TFLOPS = 600.0  # dense bf16 that a GPU of this kind sustains on random data
TERMS = 1 + 3 + 3  # forward from bf16; dlogits, f32, is split in three for dx and for the weight's gradient
WARM_UP, STEPS = 3, 10  # of a burst


def captured(step: Callable[[], object], device: str) -> Callable[[int], object]:
    """The step as a CUDA graph; on a CPU the step."""
    if device == "cpu":
        return lambda _: step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda _: graph.replay()


def steps_of(shape: Shape, device: str) -> dict[str, Callable[[], object]]:
    make = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(shape.tokens, shape.dim, **make, requires_grad=True)
    gate = (torch.randn(shape.experts, shape.dim, **make) * shape.dim**-0.5).requires_grad_()
    dlogits = torch.randn(shape.tokens, shape.experts, device=device)
    logits = moxie.gate_logits(x, gate).detach().requires_grad_()
    dweights = torch.randn(shape.tokens, shape.top_k, device=device)

    def choice() -> object:
        weights = torch.ops.moxie._select_experts(logits, None, shape.top_k)[0]
        return torch.autograd.grad(weights, logits, dweights)

    return {"logits": lambda: torch.autograd.grad(moxie.gate_logits(x, gate), (x, gate), dlogits), "choice": choice}


def measure(shape: Shape, name: str, options: argparse.Namespace) -> tuple[list[dict], list[float]]:
    """The rows of a shape, and the seconds of a copy of COPY_BYTES."""
    device = options.device
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda _: target.copy_(source)}
    calls |= {line: captured(step, device) for line, step in steps_of(shape, device).items()}
    seconds: dict[str, list[list[float]]] = {line: [] for line in calls}
    harness.interleave([([call], seconds[line]) for line, call in calls.items()], options.repetitions, device, WARM_UP, STEPS)
    spreads = {line: harness.spread([lap for (lap,) in laps]) for line, laps in seconds.items()}
    num_bytes = 3 * 2 * shape.tokens * shape.dim
    flops = TERMS * 2 * shape.tokens * shape.dim * shape.experts
    bound = max(num_bytes * spreads["copy"]["median"] / (2 * COPY_BYTES), flops / (1e12 * TFLOPS))
    rows = [{"name": line, "shape_name": name, "shape": shape.sizes(), "seconds": spreads[line]} for line in calls]
    rows[1] |= {"bytes": num_bytes, "flops": flops, "bound_seconds": bound}
    rows[1]["of_bound"] = rows[1]["seconds"]["median"] / bound
    return rows[1:], [lap for (lap,) in seconds["copy"]]


def table(report: dict) -> str:
    lines = [("what", "shape", "us", "bound us", "time / bound")]
    for row in report["rows"]:
        bound = (f"{row['bound_seconds'] * 1e6:.1f}", f"{row['of_bound']:.2f}") if "of_bound" in row else ("", "")
        lines.append((row["name"], row["shape_name"], f"{row['seconds']['median'] * 1e6:.1f}", *bound))
    copy = f"copy of 1 GiB: {report['copy']['gb_per_s']:.1f} GB/s; median of {report['repetitions']}"
    return f"{harness.about(report)}; {copy}\n{harness.text_table(lines, left=2)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, repetitions=20)
    parser.add_argument("--shapes", nargs="+", type=moe.parse_shape, help="as of bench/moe.py")
    options = harness.parse_options(parser)
    texts = (moe.QUICK_SHAPES if options.quick else moe.SHAPES)[options.device]
    report = harness.begin_report("bench/router.py", options) | {"rows": []}
    copies: list[float] = []
    for name, shape in options.shapes or [moe.parse_shape(text) for text in texts]:
        rows, copy = measure(shape, name, options)
        report["rows"] += rows
        copies += copy
    copy_seconds = harness.spread(copies)
    report["copy"] = {"seconds": copy_seconds, "gb_per_s": 2 * COPY_BYTES / copy_seconds["median"] / 1e9}
    harness.write_report(report, options, "router")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
