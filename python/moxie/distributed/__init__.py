"""Sharded models: FSDP2, tensor parallelism and checkpoints (docs/DISTRIBUTED.md).

`moxie.grouped_mm`, `moxie.expert_mlp`, `MXLinear` and `moxie.nn.MoE` take DTensors as they are; `quantize_` converts a model
before or after `fully_shard`. This package has the rest, for which torch has no name.
"""

from moxie.distributed import checkpoint as checkpoint
from moxie.distributed.agree import agree
from moxie.distributed.fsdp import quantize_all_gather_
from moxie.distributed.placement import gate_up_shard
from moxie.distributed.tensor_parallel import ExpertTensorParallel

__all__ = ["ExpertTensorParallel", "agree", "checkpoint", "gate_up_shard", "quantize_all_gather_"]
