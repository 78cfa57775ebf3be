"""Trains one MoE layer whose experts are split over the ranks of a group.

torchrun --nproc-per-node 2 examples/expert_parallel.py --steps 20
python examples/expert_parallel.py --steps 20          # one rank: the same losses
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist

import moxie.nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--tokens", type=int, default=256, help="of all ranks together")
arguments = parser.parse_args()

folder = tempfile.TemporaryDirectory()
if "RANK" in os.environ:  # torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
else:
    dist.init_process_group("gloo", init_method=f"file://{folder.name}/store", rank=0, world_size=1)
rank, size = dist.get_rank(), dist.get_world_size()
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if dist.get_backend() == "nccl" else "cpu"

torch.manual_seed(0)  # the same on every rank: gates are then equal, and experts those of a run with one rank
layer = moxie.nn.MoE(64, 128, num_experts=8, top_k=2, ep_group=dist.group.WORLD, balance="loss", device=device)
optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
target = torch.randn(64, 64)

for step in range(arguments.steps):
    torch.manual_seed(step)
    x = torch.randn(arguments.tokens, 64)
    mine = slice(arguments.tokens * rank // size, arguments.tokens * (rank + 1) // size)
    error = layer(x[mine].to(device)) - (x[mine] @ target).to(device)
    loss = error.square().sum() / arguments.tokens  # the loss of all tokens is the sum over ranks
    optimizer.zero_grad()
    (loss + layer.loss).backward()
    dist.all_reduce(layer.router.gate.weight.grad)  # every rank holds the gate: sum its gradients
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0 and (step % 5 == 0 or step == arguments.steps - 1):
        print(f"step {step}: loss {total.item():.4f}, balance {layer.loss.item():.4f}")

dist.destroy_process_group()
