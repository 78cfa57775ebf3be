#!/usr/bin/env python3
"""Measures the accuracy of the MoE layer without its router: the SQNR of y and of all gradients, h kept as it is and in FP8.

    bench/layer_sqnr.py [--recipes mxfp8_rceil_128] [--seeds 10] [--device cpu|cuda] [--quick] [--out file.json]

SQNR in dB as in bench/sqnr.py. Truth is the layer in f64 on the same bf16 inputs and the same routing. Prints a table of means
over seeds at the end, and writes JSON.
"""

import argparse
import statistics
import sys

import harness  # before torch

# isort: split
import torch
from torch import Tensor

import moxie
from moe_lines import Shape
from moe_tables import RESULTS
from sqnr import sqnr

SHAPE, QUICK_SHAPE = Shape(1024, 256, 384, 8, 2), Shape(64, 32, 32, 4, 2)


def random_inputs(shape: Shape, seed: int, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns [x, w13, w2, routing weights], ids of experts and dy, all random."""
    torch.manual_seed(seed)
    normal = lambda *sizes: torch.randn(*sizes, device=device)
    x, dy = normal(shape.tokens, shape.dim), normal(shape.tokens, shape.dim)
    w13 = normal(shape.experts, 2 * shape.hidden_dim, shape.dim) / shape.dim**0.5
    w2 = normal(shape.experts, shape.dim, shape.hidden_dim) / shape.hidden_dim**0.5
    weights, ids = normal(shape.tokens, shape.experts).softmax(-1).topk(shape.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    return [x.bfloat16(), w13.bfloat16(), w2.bfloat16(), weights], ids.int(), dy.bfloat16()


def truth_of(inputs: list[Tensor], ids: Tensor, dy: Tensor) -> list[Tensor]:
    x, w13, w2, weights = leaves = [tensor.double().requires_grad_() for tensor in inputs]
    y = torch.zeros_like(x)
    for expert in range(w13.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w13[expert].T).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        y = y.index_add(0, token, weights[token, slot][:, None] * rows)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def results_of(inputs: list[Tensor], ids: Tensor, dy: Tensor, recipe: str, keep: str) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    x, w13, w2, weights = leaves
    offs, slot_of, row_of = moxie.route(ids, w13.shape[0])
    options = {"slot_of": slot_of, "row_of": row_of, "top_k": ids.shape[1], "weights": weights, "keep": keep}
    y = moxie.expert_mlp(x, w13, w2, offs, recipe=recipe, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, repetitions=1)
    parser.add_argument("--recipes", nargs="+", default=moxie.recipe_names())
    parser.add_argument("--seeds", type=int, default=10)
    options = harness.parse_options(parser)
    shape = QUICK_SHAPE if options.quick else SHAPE
    found: dict[tuple[str, str], list[list[float]]] = {}
    for seed in range(options.seeds):
        inputs, ids, dy = random_inputs(shape, seed, options.device)
        truth = truth_of(inputs, ids, dy)
        for recipe in options.recipes:
            for keep in ("h", "h_fp8"):
                results = results_of(inputs, ids, dy, recipe, keep)
                found.setdefault((recipe, keep), []).append([sqnr(*pair) for pair in zip(results, truth)])
    rows = [
        {"recipe": recipe, "kept": keep, **dict(zip(RESULTS, map(statistics.mean, zip(*seeds))))}
        for (recipe, keep), seeds in found.items()
    ]
    report = harness.begin_report("bench/layer_sqnr.py", options) | {"shape": shape.sizes(), "seeds": options.seeds, "rows": rows}
    harness.write_report(report, options, "layer_sqnr")
    lines = [("recipe", "kept", *(f"{name} dB" for name in RESULTS))]
    lines += [(row["recipe"], row["kept"], *(f"{row[name]:.2f}" for name in RESULTS)) for row in rows]
    print(harness.text_table(lines, left=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
