#!/usr/bin/env python3
"""Measures the engines of expert parallelism at world size 1 beside the local experts: forward + backward, what the kernels of
the symmetric engine reach of a copy's bandwidth, and what c10d adds beside NCCL's own time for the same messages. Needs a GPU.

    bench/engines.py [--shapes llama4 dsv3-8 4096x512x1024x16x2] [--recipes mxfp8_rceil_128] [--engines symmetric c10d]
                     [--quick] [--out file.json]

A shape has a name or is tokens x dim x hidden_dim x experts x top_k. bench/README.md describes the method.
"""

import argparse
import gc
import statistics
import sys
import tempfile

import harness  # before torch

# isort: split
import torch
import torch.distributed as dist

import moe
import moxie
import moxie.nn
from moe_lines import Shape
from moxie.expert_parallel import ParallelExperts, member_of

LOCAL, SYMMETRIC, C10D = "local", "symmetric", "c10d"
PASS_OF_COPY = 0.8  # the share of a copy's bandwidth that the one pass of a leg of c10d is granted


class Line:
    """Experts and one batch of tokens with their route."""

    def __init__(self, name: str, experts, x, dy, ids, weights):
        self.name, self.experts, self.dy = name, experts, dy
        self.leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
        self.route, self.top_k = moxie.moe.route(ids, experts.w13.shape[0]), ids.shape[1]
        self.y: torch.Tensor | None = None
        self.seconds: list[list[float]] = []

    def forward(self, _: int) -> None:
        for leaf in (*self.leaves, self.experts.w13, self.experts.w2):
            leaf.grad = None
        offs, slot_of, row_of = self.route
        x, weights = self.leaves
        self.y = self.experts(x, offs, slot_of=slot_of, row_of=row_of, top_k=self.top_k, weights=weights)

    def backward(self, _: int) -> None:
        assert self.y is not None
        self.y.backward(self.dy)
        self.y = None


def lines_of(shape: Shape, recipe: str, engines: list[str], nccl: dist.ProcessGroup) -> list[Line]:
    tokens, dim, hidden, experts, top_k = shape.sizes()
    options = {"recipe": recipe, "weight_cache": recipe != "bf16", "device": "cuda", "dtype": torch.bfloat16}
    local = moxie.nn.GroupedExperts(dim, hidden, experts, **options)
    layers = {LOCAL: local}
    for engine in engines:
        member = member_of(nccl if engine == C10D else dist.group.WORLD)
        layers[engine] = over = ParallelExperts(dim, hidden, experts, member=member, engine=engine, **options)
        over.w13, over.w2 = local.w13, local.w2
        over.refresh_()
    x, dy = (torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scores = torch.rand(tokens, experts, device="cuda")
    weights, ids = scores.topk(top_k)
    ids = ids.to(torch.int32)
    return [Line(name, layer, x, dy, ids, weights) for name, layer in layers.items()]


def copy_bandwidth() -> float:
    """Bytes read and written in a second."""
    a, b = (torch.empty(2**30, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    seconds = harness.burst([lambda _: b.copy_(a)], 3, 10)
    return 2 * a.nbytes / statistics.median(lap[0] for lap in seconds)


def bytes_of_kernels(shape: Shape, recipe: str, wire: str) -> dict[str, tuple[int, int]]:
    """For each kernel of the exchange that moves rows here, its launches in a step and the bytes that they together cannot avoid:
    every byte read once and written once. (A rank that has all experts sends nothing.)"""
    tokens, dim, _, _, top_k = shape.sizes()
    rows = tokens * top_k
    block = int(moxie.Recipe.from_name(recipe).activations.partition("x")[2]) if wire == "fp8" else 0
    row = dim + -(-dim // block) if wire == "fp8" else 2 * dim
    return {
        # The tokens that are kept; rows of x in forward, and of dy.
        "gather_kernel": (3, 2 * tokens * row + 2 * (tokens + rows) * row),
        "combine_kernel": (2, 2 * (rows + tokens) * 2 * dim),  # y and dx
    }


def kernel_rows(line: Line, shape: Shape, recipe: str, wire: str, copy: float) -> list[dict]:
    wanted = bytes_of_kernels(shape, recipe, wire)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(3):
            line.forward(i)
            line.backward(i)
        torch.cuda.synchronize()
    rows = []
    for name, (launches, count) in wanted.items():
        found = [event for event in profiler.events() if f"::{name}" in event.name and event.device_time > 0]
        seconds = sum(event.device_time for event in found) / 3 / 1e6
        if seconds > 0:
            rows.append(
                {
                    "kernel": name,
                    "shape": shape.sizes(),
                    "recipe": recipe,
                    "launches": len(found) / 3,
                    "expected_launches": launches,
                    "seconds": seconds,
                    "of_copy": count / seconds / copy,
                }
            )
    return rows


def message_bytes(shape: Shape, recipe: str, wire: str) -> list[int]:
    """The bytes of the four messages of a step that one rank sends to itself: moxie/core/layout/wire.h."""
    tokens, dim, _, _, top_k = shape.sizes()
    pairs = tokens * top_k
    block = int(moxie.Recipe.from_name(recipe).activations.partition("x")[2]) if wire == "fp8" else 0
    row = -(-(dim + -(-dim // block) if wire == "fp8" else 2 * dim) // 16) * 16
    rows = -(-2 * dim // 16) * 16
    return [tokens * row + 8 * pairs, pairs * rows, tokens * row, pairs * (rows + 4)]


def nccl_seconds(counts: list[int], group: dist.ProcessGroup, repetitions: int) -> float:
    """Seconds that NCCL itself takes for messages of these sizes, one after the other."""
    sent = torch.empty(max(counts), dtype=torch.uint8, device="cuda").random_()
    received = torch.empty_like(sent)
    calls = [lambda _, n=count: dist.all_to_all_single(received[:n], sent[:n], group=group) for count in counts]
    return statistics.median(sum(lap) for lap in harness.burst(calls, 3, max(repetitions, 10)))


def measure(
    name: str, shape: Shape, recipe: str, options: argparse.Namespace, copy: float, nccl: dist.ProcessGroup
) -> tuple[list[dict], list[dict]]:
    gc.collect()
    torch.cuda.empty_cache()
    lines = lines_of(shape, recipe, options.engines, nccl)
    results = []
    for line in lines:
        line.forward(0)
        y = line.y
        line.backward(0)
        results.append((y, line.leaves[0].grad))
    for line in lines:
        if line.name == SYMMETRIC:
            torch.cuda.set_sync_debug_mode("error")
            line.forward(0)
            line.backward(0)
            torch.cuda.set_sync_debug_mode("default")
    same = [all(torch.equal(*both) for both in zip(results[0], one)) for one in results]
    del results
    harness.interleave([([line.forward, line.backward], line.seconds) for line in lines], options.repetitions, "cuda", 1, 4)
    rows = []
    for line, is_same in zip(lines, same):
        total = [sum(laps) for laps in line.seconds]
        rows.append(
            {
                "name": line.name,
                "shape_name": name,
                "shape": shape.sizes(),
                "recipe": recipe,
                "forward_seconds": harness.spread([laps[0] for laps in line.seconds]),
                "backward_seconds": harness.spread([laps[1] for laps in line.seconds]),
                "seconds": harness.spread(total),
                "same_bits": is_same,
            }
        )
    for line, row in zip(lines, rows):
        row["of_local"] = row["seconds"]["median"] / rows[0]["seconds"]["median"]
        if line.name == C10D:
            counts = message_bytes(shape, recipe, line.experts.wire)
            row["message_bytes"] = counts
            row["nccl_seconds"] = nccl_seconds(counts, nccl, options.repetitions)
            row["pass_seconds"] = sum(2 * count for count in counts) / (PASS_OF_COPY * copy)
            row["added_seconds"] = row["seconds"]["median"] - rows[0]["seconds"]["median"]
    kernels = [kernel_rows(line, shape, recipe, line.experts.wire, copy) for line in lines if line.name == SYMMETRIC]
    return rows, [row for of_line in kernels for row in of_line]


def table(report: dict) -> str:
    lines = [("what", "shape", "recipe", "forward ms", "backward ms", "total ms", "of local", "same y and dx")]
    for row in report["rows"]:
        times = [f"{row[part]['median'] * 1e3:.3f}" for part in ("forward_seconds", "backward_seconds", "seconds")]
        lines.append((row["name"], row["shape_name"], row["recipe"], *times, f"{row['of_local']:.3f}", str(row["same_bits"])))
    kernels = [("kernel", "shape", "recipe", "launches", "ms a step", "of a copy's bandwidth")]
    for row in report["kernels"]:
        kernels.append(
            (
                row["kernel"],
                "x".join(map(str, row["shape"])),
                row["recipe"],
                f"{row['launches']:.0f}",
                f"{row['seconds'] * 1e3:.3f}",
                f"{row['of_copy']:.2f}",
            )
        )
    legs = [("c10d adds", "shape", "recipe", "ms", "NCCL alone, ms", "one pass per leg, ms", "(added - pass) / NCCL")]
    for row in report["rows"]:
        if "nccl_seconds" in row:
            times = [f"{row[what] * 1e3:.3f}" for what in ("added_seconds", "nccl_seconds", "pass_seconds")]
            of_nccl = (row["added_seconds"] - row["pass_seconds"]) / row["nccl_seconds"]
            legs.append(("", row["shape_name"], row["recipe"], *times, f"{of_nccl:.2f}"))
    head = f"{harness.about(report)}; median of {report['repetitions']}; a copy moves {report['copy_bandwidth'] / 1e12:.2f} TB/s"
    return "\n\n".join(
        [f"{head}\n{harness.text_table(lines, left=3)}", *(harness.text_table(one, left=3) for one in (kernels, legs))]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, repetitions=20)
    parser.add_argument("--shapes", nargs="+", type=moe.parse_shape, help=f"{', '.join(moe.NAMED)}, or sizes")
    parser.add_argument("--recipes", nargs="+", default=["mxfp8_rceil_128"])
    parser.add_argument("--engines", nargs="+", choices=(SYMMETRIC, C10D), default=[SYMMETRIC, C10D])
    options = harness.parse_options(parser)
    if options.device != "cuda":
        parser.error("symmetric memory and NCCL are for GPUs")
    names = moe.QUICK_SHAPES["cuda"] if options.quick else list(moe.NAMED)
    shapes = options.shapes or [moe.parse_shape(name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        nccl = dist.new_group(backend="nccl")
        report = harness.begin_report("bench/engines.py", options)
        report |= {"copy_bandwidth": copy_bandwidth(), "rows": [], "kernels": []}
        for name, shape in shapes:
            for recipe in options.recipes:
                rows, kernels = measure(name, shape, recipe, options, report["copy_bandwidth"], nccl)
                report["rows"] += rows
                report["kernels"] += kernels
                harness.write_report(report, options, "engines")
        print(table(report))
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
