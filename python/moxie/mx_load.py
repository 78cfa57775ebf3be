"""Loads a saved MXTensor. Not in mx_tensor.py, which is imported late: torch.load(weights_only=True) must know `rebuild` as soon
as moxie is imported.
"""

import torch
from torch import Tensor

from moxie.ops import Block


def rebuild(qdata: Tensor, scale: Tensor, dtype: torch.dtype, block: Block, requires_grad: bool) -> Tensor:
    """Makes an MXTensor of bytes, which pickle and torch.save can both carry. Refuses parts that do not fit each other."""
    from moxie.mx_tensor import MXTensor

    parts = qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    return MXTensor.from_qdata_and_scales(*parts, dtype, block=block).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])
