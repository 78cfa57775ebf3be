"""MoE language models in plain torch for the conversion tests; they do not use Moxie.

Experts have both common layouts: [E, out, in], which the model transposes, and [E, in, out], which it multiplies by directly.
Every product has a bias.
"""

import torch
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN, EXPERTS, VOCABULARY = 64, 48, 4, 37


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


def rows_of(bias: torch.Tensor, offs: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the bias row [rows, N] of the expert that each row belongs to, from bias [E, N] and the ends of the experts'
    rows."""
    return bias[torch.searchsorted(offs, torch.arange(rows, device=offs.device), right=True).clamp(max=len(offs) - 1)]


class TitanExperts(nn.Module):
    """Experts in TorchTitan's layout: w1 and w3 [E, hidden, dim] and w2 [E, dim, hidden], which the forward transposes to
    multiply."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = normal(EXPERTS, HIDDEN, DIM), normal(EXPERTS, HIDDEN, DIM), normal(EXPERTS, DIM, HIDDEN)
        self.bias = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.1)

    def forward(self, x, offs):
        gate = torch._grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offs)
        up = torch._grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offs)
        y = torch._grouped_mm(F.silu(gate) * up, self.w2.bfloat16().transpose(-2, -1), offs=offs)
        return (y + rows_of(self.bias, offs, len(x))).type_as(x)


class HuggingExperts(nn.Module):
    """Experts in transformers' layout: gate_up_proj [E, dim, 2 hidden] and down_proj [E, hidden, dim], multiplied without
    transposing."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = normal(EXPERTS, DIM, 2 * HIDDEN), normal(EXPERTS, HIDDEN, DIM)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN) * 0.1)
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.1)

    def forward(self, x, offs):
        h = F.grouped_mm(x, self.gate_up_proj, offs=offs) + rows_of(self.gate_up_proj_bias, offs, len(x))
        gate, up = h.chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj, offs=offs) + rows_of(self.down_proj_bias, offs, len(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).max(-1)
        order = ids.argsort(stable=True)
        counts = F.one_hot(ids, EXPERTS).sum(0)
        return weights, order, counts.cumsum(0).to(torch.int32)


class MoE(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.router, self.experts, self.shared_expert = Router(), experts, FeedForward()

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, order, offs = self.router(flat)
        y = torch.zeros_like(flat).index_copy(0, order, self.experts(flat[order], offs))
        return (y * weights[:, None] + self.shared_expert(flat)).view_as(x)


class Block(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.attention, self.moe = Attention(), MoE(experts)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, experts: type[nn.Module] = TitanExperts, layers: int = 1, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Block(experts()) for _ in range(layers)])
        self.output = nn.Linear(DIM, VOCABULARY)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def make(experts: type[nn.Module] = TitanExperts, seed: int = 0, **kwargs) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(experts, **kwargs)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, steps: int, optimizer=None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step % 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
