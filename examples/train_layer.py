#!/usr/bin/env python3
"""Trains the expert MLPs of one MoE layer in MXFP8 and in bf16, on the same data, and prints both losses.

    examples/train_layer.py [--steps 40] [--recipe mxfp8_rceil_128] [--device cpu|cuda]

The experts learn to give the results of a second layer of the same shape. Groups of rows are ragged and change with every step.
"""

import argparse
import os

# On some virtual machines bf16 products with AMX die with SIGILL. Set before torch is imported, which reads it once.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

import moxie

EXPERTS, DIM, HIDDEN_DIM, ROWS = 4, 128, 256, 1024


class Experts(torch.nn.Module):
    def __init__(self, recipe: str):
        super().__init__()
        self.recipe = recipe
        self.w13 = torch.nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN_DIM, DIM) * DIM**-0.5)
        self.w2 = torch.nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN_DIM) * HIDDEN_DIM**-0.5)
        self.cache13 = self.cache2 = None

    def cache_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """After this call w13 and w2 are quantized once per step of the optimizer, not in every forward."""
        if self.recipe == "bf16":  # nothing to quantize
            return
        self.cache13 = moxie.WeightCache(self.w13, recipe=self.recipe)
        self.cache2 = moxie.WeightCache(self.w2, recipe=self.recipe)
        self.cache13.refresh_after(optimizer)
        self.cache2.refresh_after(optimizer)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return moxie.expert_mlp(
            x, self.w13, self.w2, offs, recipe=self.recipe, quantized_w13=self.cache13, quantized_w2=self.cache2
        )


def random_offs(device: str) -> torch.Tensor:
    ends = torch.randint(0, ROWS + 1, (EXPERTS,), device=device).sort().values
    ends[-1] = ROWS
    return ends.to(torch.int32)


def train(recipe: str, steps: int, device: str) -> list[float]:
    torch.manual_seed(0)
    hidden = Experts("bf16").to(device)
    experts = Experts(recipe).to(device)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2)
    experts.cache_weights(optimizer)
    losses = []
    for _ in range(steps):
        x = torch.randn(ROWS, DIM, device=device, dtype=torch.bfloat16)
        offs = random_offs(device)
        with torch.no_grad():
            target = hidden(x, offs)
        loss = (experts(x, offs) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipe", default="mxfp8_rceil_128")
    has_cuda = torch.cuda.is_available() and moxie.has_cuda()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_cuda else "cpu")
    options = parser.parse_args()
    baseline = train("bf16", options.steps, options.device)
    losses = train(options.recipe, options.steps, options.device)
    print(f"{'step':>4}  {'bf16':>8}  {options.recipe}")
    for step in sorted({*range(0, options.steps, 10), options.steps - 1}):
        print(f"{step:>4}  {baseline[step]:8.5f}  {losses[step]:.5f}")


if __name__ == "__main__":
    main()
