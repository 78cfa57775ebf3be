"""How a saved MXTensor comes back. Apart from mx_tensor.py, which is imported late: torch.load(weights_only=True) must know this
function as soon as moxie is imported.
"""

import torch
from torch import Tensor

from moxie.ops import Block


def rebuild(qdata: Tensor, scale: Tensor, dtype: torch.dtype, block: Block, requires_grad: bool) -> Tensor:
    """From bytes, which pickle can carry as well as torch.save. A file may hold anything: what does not fit is refused."""
    from moxie.mx_tensor import MXTensor

    parts = qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    return MXTensor.from_qdata_and_scales(*parts, dtype, block=block).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])
