#!/usr/bin/env python3
"""Measures forward + backward of the whole MoE layer: router, permutation, experts, weighted sum; each recipe beside bf16.

    bench/moe.py [--shape 4096x512x1024x16x2] [--recipes mxfp8_rceil_128] [--device cpu|cuda] [--quick] [--out file.json]

A shape is tokens x dim x hidden_dim x experts x top_k. Weights are quantized again in every step.
"""

import argparse

import harness  # before torch
import torch

import moxie
import moxie.nn

SHAPES = {"cpu": "4096x512x1024x16x2", "cuda": "16384x2048x1408x64x6"}
QUICK_SHAPE = "256x64x128x4x2"
BASELINE = "bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser)
    parser.add_argument("--shape", help="tokens x dim x hidden_dim x experts x top_k")
    parser.add_argument("--recipes", nargs="*", default=["mxfp8_rceil_128", "mxfp8_rceil"])
    options = harness.parse_options(parser)
    shape = options.shape or (QUICK_SHAPE if options.quick else SHAPES[options.device])
    tokens, dim, hidden_dim, experts, top_k = map(int, shape.split("x"))
    make = {"device": options.device, "dtype": torch.bfloat16}
    layers = {recipe: moxie.nn.MoE(dim, hidden_dim, experts, top_k, recipe=recipe, **make)
              for recipe in [BASELINE, *options.recipes]}
    for layer in layers.values():
        layer.load_state_dict(layers[BASELINE].state_dict())
    x = torch.randn(tokens, dim, **make, requires_grad=True)
    dy = torch.randn(tokens, dim, **make)

    def step(layer: moxie.nn.MoE) -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    seconds: dict[str, list[float]] = {recipe: [] for recipe in layers}
    for i in harness.rounds(options.repetitions):
        for recipe, layer in layers.items():
            lap = harness.seconds_of(lambda: step(layer), options.device)
            if i >= 0:
                seconds[recipe].append(lap)

    report = harness.begin_report("bench/moe.py", options)
    base = harness.spread(seconds[BASELINE])["median"]
    report["shape"] = shape
    report["rows"] = [{"recipe": recipe, **harness.spread(laps), "ratio": harness.spread(laps)["median"] / base}
                      for recipe, laps in seconds.items()]
    harness.write_report(report, options, "moe")
    print(f"{harness.about(report)}; {shape}; forward + backward, median of {options.repetitions}")
    lines = [("recipe", "ms", "x bf16")]
    lines += [(row["recipe"], f"{row['median'] * 1e3:.1f}", f"{row['ratio']:.2f}") for row in report["rows"]]
    print(harness.text_table(lines, 1))


if __name__ == "__main__":
    main()
