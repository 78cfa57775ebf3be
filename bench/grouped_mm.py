#!/usr/bin/env python3
"""Measures forward and backward of grouped_mm against torch's bf16 grouped GEMM and torchao's emulated MXFP8.

    bench/grouped_mm.py [--shape 2048x1024x1024x8] [--recipes mxfp8_rceil_128] [--groups ragged|zipf] [--sustained] [--passes]
                        [--plot file.png] [--device cpu|cuda] [--quick] [--out file.json]

A shape is MxNxKxG: x [M, K], w [G, N, K]. --passes also times each quantizer and GEMM of a step. --sustained adds the time of
1 s of work after 2 s of warm-up. Prints tables at the end, and writes JSON. bench/README.md describes the method.
"""

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Callable

import harness  # before torch

# isort: split
import torch

import group_sizes
import moxie

BASELINE = "torch bf16"
SHAPES = {
    "cpu": ["2048x1024x1024x8"],
    "cuda": ["131072x8192x5120x8", "131072x2048x7168x8", "32768x2048x7168x8", "131072x2048x7168x32"],
}
# The shapes of --grid: few and many rows, one to eight experts, two sizes of weights.
GRID = [(m, n, k, g) for n, k in ((8192, 5120), (2048, 7168)) for m in (32768, 128000) for g in (1, 2, 4, 8)]
QUICK_SHAPES = {"cpu": ["256x128x256x4"], "cuda": ["8192x1024x2048x8"]}
NUM_BUFFERS = 2  # sets of inputs that alternate
DENSE = "torch fp8 rowwise, dense 8192^3"  # on a GPU the TFLOPS of each pass are compared with this GEMM's
TILE_ROWS = 128  # rows of a tile of torch's bf16 grouped GEMM
CACHED = ("mxfp8_rceil_128",)  # also timed with weights quantized beforehand, as in the later micro-batches of an optimizer step


@dataclasses.dataclass
class Bench:
    """One line of the table. Repetition i calls forward(x, w) with buffers[i % NUM_BUFFERS], then backward."""

    name: str
    groups: str
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    seconds: list[list[float]] = dataclasses.field(default_factory=list)  # of each repetition: forward, backward
    sustained: float | None = None


@dataclasses.dataclass
class Pass:
    """A quantizer or GEMM of one recipe's forward and backward, timed alone. call(i) runs it on set i of the buffers."""

    recipe: str
    name: str
    flops: float  # 0: a quantizer
    bytes: float  # the least that it must read and write
    call: Callable[[int], object]
    seconds: list[list[float]] = dataclasses.field(default_factory=list)  # of each repetition
    sustained: float | None = None


# ---- what is measured --------------------------------------------------------------------------------------------------------


def torchao_forward(offs: torch.Tensor) -> Callable | None:
    try:
        from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao
        from torchao.quantization.quantize_.common import KernelPreference
    except ImportError:
        return None
    return lambda x, w: torchao._to_mxfp8_then_scaled_grouped_mm(x, w.mT, offs=offs, kernel_preference=KernelPreference.EMULATED)


def benches_of(kind: str, sizes: list[int], buffers: list[tuple[torch.Tensor, ...]], recipes: list[str]) -> list[Bench]:
    device = buffers[0][0].device.type
    offs = group_sizes.offs_of(sizes, device)
    bf16_of = lambda offs: lambda x, w: torch._grouped_mm(x, w.mT, offs=offs)
    benches = [Bench(BASELINE, kind, bf16_of(offs))]
    if device == "cuda":  # torch may be faster on groups of whole tiles, so both are measured: the faster is the baseline
        benches.append(
            Bench(
                BASELINE, f"multiples of {TILE_ROWS}", bf16_of(group_sizes.offs_of(group_sizes.aligned(sizes, TILE_ROWS), device))
            )
        )
    for recipe in recipes:
        benches.append(Bench(recipe, kind, lambda x, w, recipe=recipe: moxie.grouped_mm(x, w, offs, recipe=recipe)))
        if device == "cuda" and recipe in CACHED:
            caches = {w: moxie.quantize_weights(w.detach(), recipe=recipe) for _, w, _ in buffers}
            benches.append(
                Bench(
                    f"{recipe}, w quantized before",
                    kind,
                    lambda x, w, recipe=recipe, caches=caches: moxie.grouped_mm(x, w, offs, recipe=recipe, quantized_w=caches[w]),
                )
            )
    # torchao requires groups of multiples of 32 rows. Its emulation is measured on a CPU only.
    aligned = group_sizes.aligned(sizes, 32)
    if device == "cpu" and sum(sizes) % 32 == 0 and min(aligned) > 0:
        forward = torchao_forward(group_sizes.offs_of(aligned, device))
        if forward:
            benches.append(Bench("torchao mxfp8 emulated", "multiples of 32", forward))
    return benches


def buffers_of(shape: tuple[int, ...], device: str) -> list[tuple[torch.Tensor, ...]]:
    """Makes NUM_BUFFERS sets of x, w and dy with random values, because products of zeros run faster."""
    rows, n, k, groups = shape
    random_of = lambda *sizes: torch.randn(*sizes, device=device).to(torch.bfloat16)
    return [
        (random_of(rows, k).requires_grad_(), (random_of(groups, n, k) * k**-0.5).requires_grad_(), random_of(rows, n))
        for _ in range(NUM_BUFFERS)
    ]


def layout_made(recipe: str, w: torch.Tensor) -> str:
    """The layout in which this device quantizes a recipe's scales, found from the shape of w's scales."""
    blocks = moxie.Recipe.from_name(recipe)
    if blocks.scaling != "block":
        return "plain"
    _, scale, _, scale_t = moxie.quantize_weights(w, recipe=recipe)
    if scale.dim() == 2:
        return "swizzled"
    down, across = map(int, blocks.weights.split("x"))
    as_plain = scale.shape[2] == math.ceil(w.shape[2] / across), scale_t.shape[2] == math.ceil(w.shape[1] / max(down, across))
    return "plain" if all(as_plain) else "quads"


def passes_of(recipe: str, shape: tuple[int, ...], sizes: list[int], buffers: list[tuple[torch.Tensor, ...]]) -> list[Pass]:
    """Each quantizer and GEMM of a recipe that quantizes all operands; nothing for other recipes."""
    blocks = moxie.Recipe.from_name(recipe)
    if blocks.scaling == "none" or blocks.wgrad_with_hp:
        return []
    rows, n, k, groups = shape
    offs = group_sizes.offs_of(sizes, buffers[0][0].device.type)
    x, w, dy = ([buffer[j].detach() for buffer in buffers] for j in range(3))

    def quantize(t: torch.Tensor, colwise: str) -> tuple[torch.Tensor, ...]:
        if blocks.scaling == "row":
            return *moxie.quantize_per_row(t, offs=offs), *moxie.quantize_per_col(t, offs=offs)
        return moxie.quantize_both(
            t, offs=offs, rowwise_block=blocks.activations, colwise_block=colwise, rule=blocks.rule, scale_layout=layout
        )

    of_x = lambda i: quantize(x[i % NUM_BUFFERS], blocks.wgrad_x)
    of_dy = lambda i: quantize(dy[i % NUM_BUFFERS], blocks.wgrad_dy)
    of_w = lambda i: moxie.quantize_weights(w[i % NUM_BUFFERS], recipe=recipe)
    layout = layout_made(recipe, w[0])
    how = {"recipe": recipe, "scale_layout": layout}
    xq, wq, dyq = ([of(i) for i in range(NUM_BUFFERS)] for of in (of_x, of_w, of_dy))
    at = lambda forms, i, form: forms[i % NUM_BUFFERS][2 * form : 2 * form + 2]
    flops, a, b = 2.0 * sum(sizes) * n * k, rows * (k + 2 * n), groups * n * k
    return [
        Pass(recipe, "quantize x", 0, 4.0 * rows * k, of_x),
        Pass(recipe, "quantize w", 0, 4.0 * b, of_w),
        Pass(recipe, "quantize dy", 0, 4.0 * rows * n, of_dy),
        Pass(recipe, "forward", flops, a + b, lambda i: moxie.grouped_fwd(*at(xq, i, 0), *at(wq, i, 0), offs, **how)),
        Pass(
            recipe,
            "dgrad",
            flops,
            rows * (n + 2 * k) + b,
            lambda i: moxie.grouped_dgrad(*at(dyq, i, 0), *at(wq, i, 1), offs, **how),
        ),
        Pass(
            recipe,
            "wgrad",
            flops,
            rows * (n + k) + 2 * b,
            lambda i: moxie.grouped_wgrad(*at(dyq, i, 1), *at(xq, i, 1), rows, offs, **how),
        ),
    ]


def dense_pass() -> Pass:
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    ones = torch.ones(size, 1, device="cuda")
    return Pass(
        "",
        DENSE,
        2.0 * size**3,
        4.0 * size**2,
        lambda i: torch._scaled_mm(a, b.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True),
    )


# ---- how ---------------------------------------------------------------------------------------------------------------------


def calls_of(bench: Bench, buffers: list[tuple[torch.Tensor, ...]]) -> list[Callable[[int], object]]:
    """Two functions to time: the first runs forward on set i of the buffers, the second backward on its result."""
    y = None

    def forward(i: int) -> None:
        nonlocal y
        y = bench.forward(*buffers[i % NUM_BUFFERS][:2])

    def backward(i: int) -> None:
        nonlocal y
        x, w, dy = buffers[i % NUM_BUFFERS]
        torch.autograd.grad(y, (x, w), dy)
        y = None

    return [forward, backward]


def sustain_all(benches: list[Bench], passes: list[Pass], buffers: list[tuple[torch.Tensor, ...]], quick: bool) -> None:
    device = buffers[0][0].device.type
    for bench in benches:
        total = min(sum(seconds) for seconds in bench.seconds)
        forward, backward = calls_of(bench, buffers)
        call = lambda i, forward=forward, backward=backward: (forward(i), backward(i))
        bench.sustained = harness.sustain(call, total, device, quick)
    for one in passes:
        if one.flops:
            one.sustained = harness.sustain(one.call, min(one.seconds)[0], device, quick)


# ---- results -----------------------------------------------------------------------------------------------------------------


def rows_of(benches: list[Bench], shape: tuple[int, ...]) -> list[dict]:
    rows = []
    for bench in benches:
        forward, backward = zip(*bench.seconds)
        total = [sum(seconds) for seconds in bench.seconds]
        rows.append(
            {
                "name": bench.name,
                "shape": list(shape),
                "groups": bench.groups,
                "forward_seconds": harness.spread(forward),
                "backward_seconds": harness.spread(backward),
                "seconds": harness.spread(total),
            }
        )
    baseline = min(row["seconds"]["median"] for row in rows if row["name"] == BASELINE)
    sustained = [bench.sustained for bench in benches if bench.name == BASELINE and bench.sustained]
    for row, bench in zip(rows, benches):
        row["times_bf16"] = row["seconds"]["median"] / baseline
        if bench.sustained:
            row["sustained_seconds"] = bench.sustained
            row["sustained_times_bf16"] = bench.sustained / min(sustained)
    return rows


def pass_rows(passes: list[Pass], shape: tuple[int, ...]) -> list[dict]:
    """The rows of the report for --passes. A GEMM's TFLOPS do not count padding; a quantizer's GB/s count the least bytes."""
    dense = next((one for one in passes if one.name == DENSE), None)
    rows = []
    for one in passes:
        row = {
            "name": one.recipe,
            "pass": one.name,
            "shape": list(shape),
            "seconds": harness.spread([lap for (lap,) in one.seconds]),
        }
        for protocol, seconds in (("burst", row["seconds"]["median"]), ("sustained", one.sustained)):
            if seconds is None:
                continue
            row[protocol] = (one.flops / 1e12 if one.flops else one.bytes / 1e9) / seconds
            if dense and one.flops:
                base = statistics.median(lap for (lap,) in dense.seconds) if protocol == "burst" else dense.sustained
                row[f"{protocol}_of_dense"] = row[protocol] * base / (dense.flops / 1e12)
        row["flops"], row["bytes"] = one.flops, one.bytes
        rows.append(row)
    return rows


def table(report: dict) -> str:
    head = ("what", "M x N x K x G", "groups", "forward ms", "backward ms", "total ms", "x bf16")
    sustained = any("sustained_seconds" in row for row in report["rows"])
    lines = [head + (("sustained ms", "x bf16") if sustained else ())]
    for row in report["rows"]:
        cells = [f"{row[part]['median'] * 1e3:.3f}" for part in ("forward_seconds", "backward_seconds", "seconds")]
        cells.append(f"{row['times_bf16']:.2f}")
        if sustained:
            cells += [f"{row['sustained_seconds'] * 1e3:.3f}", f"{row['sustained_times_bf16']:.2f}"]
        lines.append((row["name"], "x".join(map(str, row["shape"])), row["groups"], *cells))
    return (
        f"{harness.about(report)}, oneDNN up to {report['machine']['onednn_max_isa']}; median of "
        f"{report['repetitions']}; w quantized in every step\n{harness.text_table(lines, left=3)}"
    )


def pass_table(report: dict) -> str:
    lines = [("recipe", "M x N x K x G", "pass", "ms", "burst", "of dense", "sustained", "of dense", "")]
    for row in report["passes"]:
        number = lambda name, form, row=row: format(row[name], form) if name in row else ""
        lines.append(
            (
                row["name"],
                "x".join(map(str, row["shape"])),
                row["pass"],
                f"{row['seconds']['median'] * 1e3:.3f}",
                number("burst", ".1f"),
                number("burst_of_dense", ".3f"),
                number("sustained", ".1f"),
                number("sustained_of_dense", ".3f"),
                "TFLOPS" if row["flops"] else "GB/s",
            )
        )
    return harness.text_table(lines, left=3)


def parse_shape(text: str) -> tuple[int, ...]:
    sizes = harness.sizes_of(text)
    if len(sizes) != 4 or sizes[0] < 16 * sizes[3]:
        raise argparse.ArgumentTypeError(f"a shape is MxNxKxG with at least 16 rows per group, got {text}")
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_options(parser)
    parser.add_argument("--shape", nargs="+", type=parse_shape, help="MxNxKxG: x [M, K], w [G, N, K]")
    parser.add_argument(
        "--grid", action="store_true", help="16 shapes: M 32768 and 128000; N x K 8192 x 5120 and 2048 x 7168; G 1, 2, 4, 8"
    )
    parser.add_argument("--recipes", nargs="+", help="default: every one whose numerics differ")
    parser.add_argument(
        "--groups",
        choices=("ragged", "zipf"),
        default="ragged",
        help="sizes near the mean; or one large, one empty, the others falling",
    )
    parser.add_argument("--sustained", action="store_true", help="also 1 s of each after 2 s of it")
    parser.add_argument("--passes", action="store_true", help="also each quantizer and product of a step on its own")
    parser.add_argument("--plot", type=pathlib.Path, help="picture: speed-up against M, and the roofline of --passes")
    options = harness.parse_options(parser)
    if options.grid and options.quick:
        parser.error("--grid is 16 large shapes, --quick small ones: give one of them")
    recipes = options.recipes or [name for name in moxie.recipe_names() if "emulated" not in name]
    shapes = (options.shape or []) + (GRID if options.grid else []) or [
        parse_shape(text) for text in (QUICK_SHAPES if options.quick else SHAPES)[options.device]
    ]
    report = harness.begin_report("bench/grouped_mm.py", options) | {"rows": [], "passes": []}
    for shape in shapes:
        sizes = (group_sizes.zipf if options.groups == "zipf" else group_sizes.ragged)(shape[0], shape[3])
        buffers = buffers_of(shape, options.device)
        benches = benches_of(options.groups, sizes, buffers, recipes)
        harness.interleave([(calls_of(bench, buffers), bench.seconds) for bench in benches], options.repetitions, options.device)
        passes = []
        if options.passes:
            passes = [one for recipe in recipes for one in passes_of(recipe, shape, sizes, buffers)]
            passes += [dense_pass()] if options.device == "cuda" else []
            harness.interleave([([one.call], one.seconds) for one in passes], options.repetitions, options.device)
        if options.sustained:
            sustain_all(benches, passes, buffers, options.quick)
        report["rows"] += rows_of(benches, shape)
        report["passes"] += pass_rows(passes, shape)
    harness.write_report(report, options, "grouped_mm")
    if options.plot:
        import grouped_plots  # needs matplotlib

        grouped_plots.draw(report, options.plot, options.device, BASELINE, harness.about(report))
        print(f"drawn in {options.plot}\n")
    if report["passes"]:
        print(pass_table(report) + "\n")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
