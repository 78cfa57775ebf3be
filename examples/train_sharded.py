"""Trains a small MoE model with FSDP2 and tensor parallelism; half way it saves a checkpoint and continues from it.

On CPUs, with four processes in a 2 x 2 mesh:

    torchrun --nproc-per-node 4 examples/train_sharded.py --tp 2

Without torchrun it runs as one process.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import moxie
import moxie.distributed
import moxie.nn
from moxie.distributed import checkpoint

# FSDP2 frees the weights of a block after its forward; with keep_w=false nothing of them stays in another form.
RECIPE = "mxfp8_rceil:keep_w=false"
DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 128, 256, 8, 2, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = moxie.MXLinear(DIM, 4 * DIM, config=RECIPE)
        self.down = nn.Linear(4 * DIM, DIM)
        self.moe = moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, recipe=RECIPE)

    def forward(self, x):
        x = x + self.down(nn.functional.silu(self.up(x)))
        return x + self.moe(x)


def build(mesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        if mesh["tp"].size() > 1:  # torch 2.11 cannot
            styles = {"moe": moxie.distributed.ExpertTensorParallel(), "up": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(block, mesh["tp"], styles)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    if mesh["dp"].size() > 1:
        moxie.distributed.quantize_all_gather_(model, "32x32")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = tempfile.NamedTemporaryFile()
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        if step == options.steps // 2:  # as if the run had ended and a new process resumed it
            checkpoint.save(folder[0], step, model, optimizer)
            model = build(mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            checkpoint.load(folder[0], model, optimizer)
        # Ranks of one tensor-parallel group see the same tokens.
        generator = torch.Generator().manual_seed(1000 * step + mesh["dp"].get_local_rank())
        x = torch.randn(TOKENS, DIM, generator=generator).bfloat16()
        loss = (model(x).float() - x.float().roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
