#!/usr/bin/env python3
"""Measures the accuracy of each recipe: the SQNR of y, dx and dw, and the bytes of x kept for backward.

    bench/sqnr.py [--shape 2048x1024x1024x8] [--recipes mxfp8_rceil_128] [--device cpu|cuda] [--quick] [--out file.json]

SQNR in dB, 10 log10(|truth|^2 / |result - truth|^2). Truth is the f64 product of the same Gaussian bf16 inputs. Prints a table
at the end, and writes JSON.
"""

import argparse
import sys

import harness  # before torch

# isort: split
import torch

import moxie
from group_sizes import offs_of, ragged
from grouped_mm import buffers_of, parse_shape

# (rows, groups) of the columns "x kept". They are counted on the meta device, which allocates nothing.
MEMORY = [(2048, 8), (131072, 8), (131072, 256)]
MEMORY_SIZES = (1024, 1024)  # n and k


def sqnr(result: torch.Tensor, truth: torch.Tensor) -> float:
    noise = (result.double() - truth).square().sum()
    return (10 * torch.log10(truth.square().sum() / noise)).item()


def truth_of(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    x, w, dy = (tensor.detach().double() for tensor in (x, w, dy))
    parts = list(zip(x.split(sizes), w, dy.split(sizes)))
    return [
        torch.cat([rows @ matrix.T for rows, matrix, _ in parts]),
        torch.cat([grad @ matrix for _, matrix, grad in parts]),
        torch.stack([grad.T @ rows for rows, _, grad in parts]),
    ]


def bytes_kept_per_row(recipe: str, rows: int, groups: int) -> float:
    """How many bytes per row of x autograd keeps for backward if only w requires a gradient."""
    n, k = MEMORY_SIZES
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
    w = torch.empty(groups, n, k, dtype=torch.bfloat16, device="meta", requires_grad=True)
    offs = torch.empty(groups, dtype=torch.int32, device="meta")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        moxie.grouped_mm(x, w, offs, recipe=recipe)
    return (sum(kept) - offs.nbytes) / rows


def row_of(recipe: str, buffers: tuple[torch.Tensor, ...], sizes: list[int], truth: list[torch.Tensor]) -> dict:
    x, w, dy = buffers
    y = moxie.grouped_mm(x, w, offs_of(sizes, x.device), recipe=recipe)
    results = [y, *torch.autograd.grad(y, (x, w), dy)]
    row = {"recipe": recipe}
    row |= {name: sqnr(result, right) for name, result, right in zip(("y", "dx", "dw"), results, truth)}
    baseline = 2 * MEMORY_SIZES[1]  # bf16
    row["kept_of_bf16"] = [bytes_kept_per_row(recipe, *sizes) / baseline for sizes in MEMORY]
    return row


def table(report: dict) -> str:
    lines = [("recipe", "y dB", "dx dB", "dw dB", *(f"x kept, M {m} G {g}" for m, g in report["memory"]))]
    for row in report["rows"]:
        lines.append(
            (
                row["recipe"],
                *(f"{row[name]:.2f}" for name in ("y", "dx", "dw")),
                *(f"{share:.3f}" for share in row["kept_of_bf16"]),
            )
        )
    return f"{'x'.join(map(str, report['shape']))}, {harness.about(report)}\n{harness.text_table(lines, left=1)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_options(parser, repetitions=1)
    parser.add_argument("--shape", type=parse_shape, help="MxNxKxG: x [M, K], w [G, N, K]")
    parser.add_argument("--recipes", nargs="+", default=moxie.recipe_names())
    options = harness.parse_options(parser)
    shape = options.shape or parse_shape("256x128x256x4" if options.quick else "2048x1024x1024x8")
    buffers = buffers_of(shape, options.device)[0]
    sizes = ragged(shape[0], shape[3])
    truth = truth_of(*buffers, sizes)
    report = harness.begin_report("bench/sqnr.py", options) | {
        "shape": list(shape),
        "memory": MEMORY,
        "rows": [row_of(recipe, buffers, sizes, truth) for recipe in options.recipes],
    }
    harness.write_report(report, options, "sqnr")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
