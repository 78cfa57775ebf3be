"""Trains a small MoE model in bf16, then the same model in MXFP8: one line differs."""

import torch
import torch.nn.functional as F
from torch import nn

import moxie


class MoE(nn.Module):
    """A stock MoE layer: a router, experts as 3D parameters, torch's grouped product."""

    def __init__(self, dim: int = 64, hidden: int = 128, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) * hidden**-0.5)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).max(-1)
        order = ids.argsort()
        offs = F.one_hot(ids, len(self.w1)).sum(0).cumsum(0).to(torch.int32)
        h = F.silu(torch._grouped_mm(x[order], self.w1.transpose(-2, -1), offs=offs))
        y = torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=offs)
        return torch.zeros_like(x).index_copy(0, order, y) * weights[:, None]


class Model(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.up, self.moe, self.output = nn.Linear(dim, dim), MoE(dim), nn.Linear(dim, 10)

    def forward(self, x):
        x = x + self.moe(self.up(x))
        return self.output(x)


def train(recipe: str, steps: int = 30) -> float:
    torch.manual_seed(0)
    model = Model().bfloat16()
    if recipe != "bf16":
        print(moxie.quantize_(model, recipe))
    x = torch.randn(128, 64, dtype=torch.bfloat16)
    labels = (x.float() @ torch.randn(64, 10)).argmax(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = F.cross_entropy(model(x).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    losses = {recipe: train(recipe) for recipe in ("bf16", "mxfp8_rceil_128")}
    for recipe, loss in losses.items():
        print(f"{recipe:16} loss {loss:.4f}")
