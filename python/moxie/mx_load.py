"""Loads a saved MXTensor. This is a file of its own because torch.load(weights_only=True) must know `rebuild` as soon as moxie is
imported, while mx_tensor.py, which is slow to import, is imported on first use.
"""

import torch
from torch import Tensor

from moxie.ops import Block


def rebuild(qdata: Tensor, scale: Tensor, dtype: torch.dtype, block: Block, requires_grad: bool) -> Tensor:
    """Makes an MXTensor from qdata and scale as bytes, the form in which pickle and torch.save hold them. Raises if their shapes
    do not match."""
    from moxie.mx_tensor import MXTensor

    parts = qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    return MXTensor.from_qdata_and_scales(*parts, dtype, block=block).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])
