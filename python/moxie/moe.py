"""The ops of a mixture-of-experts layer besides the grouped products: routing, permutation, SwiGLU.

Each of the T tokens has k slots, one per chosen expert: slot t * k + j is token t's copy for expert ids[t, j]. The R = T * k rows
of the grouped matrix are the slots, sorted by expert and then by token. No op waits for the device, and no token is dropped.
"""

import torch
from torch import Tensor

from moxie.ops import Activation

_ops = torch.ops.moxie


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] times weight [E, D], transposed: f32 [T, E] for any dtypes. Differentiable; backward keeps x in its own dtype.

    >>> moxie.gate_logits(torch.ones(2, 3, dtype=torch.bfloat16), torch.eye(3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    return _ops.gate_logits(x, weight)


def top_k(scores: Tensor, k: int) -> Tensor:
    """The ids, int32 [T, k], of the k largest scores [T, E] of each token. Among equal scores the smaller id comes first.

    >>> moxie.top_k(torch.tensor([[0.1, 0.5, 0.5, 0.2]]), 2).tolist()
    [[1, 2]]
    """
    return _ops.top_k(scores, k)


def route(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts slots by expert: returns offs [E], slot_of [R] (the slot of each row) and its inverse row_of [T * k].

    >>> offs, slot_of, row_of = moxie.route(torch.tensor([[1, 0], [2, 1]], dtype=torch.int32), 3)
    >>> offs.tolist(), slot_of.tolist(), row_of.tolist()
    ([1, 3, 4], [1, 0, 3, 2], [1, 0, 3, 2])
    """
    return _ops.route(ids, num_experts)


def permute(x: Tensor, slot_of: Tensor, row_of: Tensor, top_k: int, *, weights: Tensor | None = None) -> Tensor:
    """Copies tokens x [T, D] to rows [R, D], sorted by expert. Differentiable in x.

    >>> x = torch.tensor([[1.0], [2.0]])
    >>> offs, slot_of, row_of = moxie.route(torch.tensor([[1, 0], [2, 1]], dtype=torch.int32), 3)
    >>> moxie.permute(x, slot_of, row_of, 2).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    return _ops.permute(x, slot_of, row_of, top_k, weights=weights)


def unpermute(
    rows: Tensor,
    slot_of: Tensor,
    row_of: Tensor,
    num_tokens: int,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Adds up each token's rows in f32, times weights (f32 [T, k]) if given: x [T, D]. Differentiable in rows and weights.

    >>> offs, slot_of, row_of = moxie.route(torch.tensor([[1, 0], [2, 1]], dtype=torch.int32), 3)
    >>> rows = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    >>> moxie.unpermute(rows, slot_of, row_of, 2, weights=torch.tensor([[0.5, 0.5], [1.0, 0.0]])).flatten().tolist()
    [15.0, 40.0]
    """
    return _ops.unpermute(rows, slot_of, row_of, num_tokens, weights=weights)


def unpermute_weights(dout: Tensor, rows: Tensor, row_of: Tensor, top_k: int) -> Tensor:
    """The gradient of unpermute's weights: dout[t] . rows[row of slot (t, j)], f32 [T, k].

    >>> moxie.unpermute_weights(torch.ones(1, 3), torch.ones(2, 3), torch.tensor([0, 1], dtype=torch.int32), 2).tolist()
    [[3.0, 3.0]]
    """
    return _ops.unpermute_weights(dout, rows, row_of, top_k)


def swiglu(h: Tensor, *, activation: Activation = "swiglu") -> Tensor:
    """silu(gate) * up, with h [R, 2F] = [gate, up]; computed in f32 and rounded once. Differentiable.

    `activation="clamped_swiglu"` is the activation of gpt-oss: gate is clamped to at most 7, up to the range -7 to 7, and the
    result is gate * sigmoid(1.702 * gate) * (up + 1).

    >>> h = torch.randn(4, 6)
    >>> torch.allclose(moxie.swiglu(h), torch.nn.functional.silu(h[:, :3]) * h[:, 3:], atol=1e-6)
    True
    """
    return _ops.swiglu(h, activation=activation)


def swiglu_backward(da: Tensor, h: Tensor, *, activation: Activation = "swiglu") -> Tensor:
    """The gradient of swiglu: dh [R, 2F] from da [R, F].

    >>> h = torch.randn(4, 6, requires_grad=True)
    >>> moxie.swiglu(h).sum().backward()
    >>> torch.equal(h.grad, moxie.swiglu_backward(torch.ones(4, 3), h.detach()))
    True
    """
    return _ops.swiglu_backward(da, h, activation=activation)
