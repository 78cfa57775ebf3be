#!/usr/bin/env python3
"""Measures the host time of a small MoE layer: forward + backward, eager, steps in a row with one synchronization at the end.
On a GPU it also counts the kernels of a step, copies and fills included.

    bench/host_time.py [--shape 512x256x512x8x2] [--recipe mxfp8_rceil_128] [--device cuda|cpu] [--steps 400] [--out FILE]

A shape is tokens x dim x hidden_dim x experts x top_k. At these sizes a GPU waits for the host, so a step's time is the host's.
To compare two builds, alternate runs with MOXIE_LIBRARY and PYTHONPATH of each: processes differ by 10 %.
"""

import argparse
import time

import harness  # before torch

# isort: split
import torch

import moe_kernels
import moxie.nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, repetitions=9)
    parser.add_argument("--shape", default="512x256x512x8x2", help="tokens x dim x hidden_dim x experts x top_k")
    parser.add_argument("--recipe", default="mxfp8_rceil_128")
    parser.add_argument("--steps", type=int, default=400, help="of one repetition")
    options = harness.parse_options(parser)
    tokens, dim, hidden_dim, experts, top_k = map(int, options.shape.split("x"))
    steps = 10 if options.quick else options.steps
    make = {"device": options.device, "dtype": torch.bfloat16}
    layer = moxie.nn.MoE(dim, hidden_dim, experts, top_k, recipe=options.recipe, **make)
    x, dy = torch.randn(tokens, dim, **make, requires_grad=True), torch.randn(tokens, dim, **make)

    def step(_: int = 0) -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    seconds = [lap for i in harness.rounds(options.repetitions) for lap in [run()] if i >= 0]
    report = harness.begin_report("bench/host_time.py", options)
    report |= {"shape": options.shape, "recipe": options.recipe, "steps": steps, "seconds": harness.spread(seconds)}
    kernels = ""
    if options.device == "cuda":
        report["kernels"] = moe_kernels.profile(step, options.device)
        kernels = f"; {sum(row['launches'] for row in report['kernels']):.0f} kernels"
    harness.write_report(report, options, "host_time")
    print(
        f"{harness.about(report)}; {options.shape}, {options.recipe}: {report['seconds']['median'] * 1e3:.3f} ms a step, "
        f"median of {options.repetitions} times {steps}{kernels}"
    )


if __name__ == "__main__":
    main()
