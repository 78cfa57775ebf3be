"""MXFP8 for training mixture-of-experts models.

Exact MXFP8 numerics as PyTorch ops, with the same results on every device. Every op has a function here. `moxie.nn` has
the modules of an MoE layer, `moxie.stats` measures quantization errors, and `moxie.torchao_compat` has torchao's names.

>>> import torch
>>> import moxie
>>> x = torch.randn(64, 96)
>>> qdata, scale = moxie.quantize_rowwise(x)
>>> moxie.dequantize_rowwise(qdata, scale, dtype=torch.float32).shape
torch.Size([64, 96])
"""

from moxie import _library as _library  # must come first: importing it registers the ops
from moxie import mx_load as mx_load  # lets torch.load(weights_only=True) load an MXTensor
from moxie.config import (
    FP8GroupedMMConfig,
    FP8GroupedMMRecipe,
    GroupedMMConfig,
    KernelPreference,
    MXFP8GroupedMMConfig,
    MXFP8GroupedMMRecipe,
    MXLinearConfig,
    MXLinearRecipeName,
    ScaleCalculationMode,
)
from moxie.convert import LM_SKIP, quantize_, unquantize_
from moxie.explain import Explanation, explain
from moxie.fqn import FqnToConfig
from moxie.fused import (
    permute_quantize_both,
    permute_quantize_rowwise,
    swiglu_backward_quantize_both,
    swiglu_quantize_both,
    swiglu_quantize_rowwise,
)
from moxie.gemm import (
    WeightCache,
    expert_mlp,
    grouped_dgrad,
    grouped_fwd,
    grouped_mm,
    grouped_wgrad,
    grouped_wgrad_add_,
    quantize_weights,
    sum_groups,
)
from moxie.linear import MXLinear
from moxie.moe import gate_logits, permute, route, swiglu, swiglu_backward, top_k, unpermute, unpermute_weights
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
from moxie.participation import Participation, participation
from moxie.recipe import Recipe, recipe_names
from moxie.refresh import refresh_, refresh_after
from moxie.stats import quantization_stats, sqnr

__version__ = "0.1.0"

__all__ = [
    "LM_SKIP",
    "Explanation",
    "FP8GroupedMMConfig",
    "FP8GroupedMMRecipe",
    "FqnToConfig",
    "GroupedMMConfig",
    "KernelPreference",
    "MXFP8GroupedMMConfig",
    "MXFP8GroupedMMRecipe",
    "MXLinear",
    "MXLinearConfig",
    "MXLinearRecipeName",
    "MXTensor",
    "Participation",
    "Recipe",
    "ScaleCalculationMode",
    "WeightCache",
    "compact_scale",
    "dequantize_colwise",
    "dequantize_rowwise",
    "expert_mlp",
    "explain",
    "gate_logits",
    "grouped_dgrad",
    "grouped_fwd",
    "grouped_mm",
    "grouped_wgrad",
    "grouped_wgrad_add_",
    "has_cuda",
    "pad_groups",
    "padded_offs",
    "participation",
    "permute",
    "permute_quantize_both",
    "permute_quantize_rowwise",
    "quantization_stats",
    "quantize_",
    "quantize_both",
    "quantize_colwise",
    "quantize_per_col",
    "quantize_per_row",
    "quantize_rowwise",
    "quantize_weights",
    "recipe_names",
    "refresh_",
    "refresh_after",
    "replicate_scale",
    "requantize",
    "route",
    "sqnr",
    "sum_groups",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize_both",
    "swiglu_quantize_both",
    "swiglu_quantize_rowwise",
    "swizzle_scale",
    "top_k",
    "unpad_groups",
    "unpermute",
    "unpermute_weights",
    "unquantize_",
    "unswizzle_scale",
]


def __getattr__(name: str):
    # MXTensor is imported on first use only: its module imports torch._dynamo, which takes seconds.
    if name == "MXTensor":
        from moxie.mx_tensor import MXTensor

        return MXTensor
    if name == "cmake_prefix_path":  # computed on first use, because it raises in a source tree
        from moxie.cmake_prefix import cmake_prefix_path

        return cmake_prefix_path()
    raise AttributeError(f"module 'moxie' has no attribute {name!r}")
