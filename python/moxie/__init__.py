"""MXFP8 for training mixture-of-experts models.

Exact MXFP8 numerics as PyTorch ops, the same on every device. Every function is in `moxie.ops`, and here.

>>> import torch
>>> import moxie
>>> x = torch.randn(64, 96)
>>> qdata, scale = moxie.quantize_rowwise(x)
>>> moxie.dequantize_rowwise(qdata, scale, dtype=torch.float32).shape
torch.Size([64, 96])
"""

from moxie import _library as _library  # first: it registers the ops
from moxie.ops import (
    compact_scale,
    dequantize_colwise,
    dequantize_rowwise,
    has_cuda,
    pad_groups,
    padded_offs,
    quantize_both,
    quantize_colwise,
    quantize_per_col,
    quantize_per_row,
    quantize_rowwise,
    replicate_scale,
    requantize,
    swizzle_scale,
    unpad_groups,
    unswizzle_scale,
)
from moxie.gemm import (
    WeightCache,
    expert_mlp,
    grouped_dgrad,
    grouped_mm,
    grouped_wgrad,
    grouped_wgrad_add_,
    quantize_weights,
    sum_groups,
)
from moxie.moe import permute, route, swiglu, swiglu_backward, top_k, unpermute, unpermute_weights
from moxie.recipe import Recipe, recipe_names

__version__ = "0.1.0"

__all__ = [
    "Recipe",
    "WeightCache",
    "compact_scale",
    "dequantize_colwise",
    "dequantize_rowwise",
    "expert_mlp",
    "grouped_dgrad",
    "grouped_mm",
    "grouped_wgrad",
    "grouped_wgrad_add_",
    "has_cuda",
    "pad_groups",
    "padded_offs",
    "permute",
    "quantize_both",
    "quantize_colwise",
    "quantize_per_col",
    "quantize_per_row",
    "quantize_rowwise",
    "quantize_weights",
    "recipe_names",
    "replicate_scale",
    "requantize",
    "route",
    "sum_groups",
    "swiglu",
    "swiglu_backward",
    "swizzle_scale",
    "top_k",
    "unpad_groups",
    "unpermute",
    "unpermute_weights",
    "unswizzle_scale",
]
