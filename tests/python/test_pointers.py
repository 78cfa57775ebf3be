"""Tensors may begin at any element of a buffer, as views of flat parameters or gradients do. Nothing around them is written."""

import pytest
import torch

import moxie
from grouped_reference import gaussian
from support import CASES, Buffer, Case, as_tuple, assert_same_bytes, out_case, poisoned

OFFSETS = range(16)  # in elements; kernels load 16 bytes at a time, so this covers every alignment
SIZES = [37, 0, 160, 5, 70]


def step(recipe, tensors, offs):
    """Runs forward and backward twice: with dw added to main_grad, and with dw as a gradient of its own."""
    x, w, dy, bias, main_grad = tensors
    leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
    y = moxie.grouped_mm(leaves[0], leaves[1], offs, recipe=recipe, bias=leaves[2], main_grad=main_grad)
    y.backward(dy.to(y.dtype) if dy.dtype != y.dtype else dy)
    again = w.detach().requires_grad_()
    moxie.grouped_mm(x, again, offs, recipe=recipe).backward(dy)
    return y.detach(), leaves[0].grad, leaves[2].grad, main_grad.clone(), again.grad


@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_operands_and_main_grad_may_begin_at_any_element(recipe, dtype, grouped, device):
    p = gaussian(SIZES if grouped else [272], 48, 80, tail=3, device=device, dtype=dtype, bias="gn", seed=1)
    if not grouped:
        p.offs, p.bias = None, p.bias[0]
    tensors = (p.x, p.w, p.dy, p.bias, torch.ones(p.w.shape, device=device))
    expected = step(recipe, [t.clone() for t in tensors], p.offs)
    for offset in OFFSETS:
        # The five tensors have five different offsets, and in the course of the loop each tensor has all of them.
        buffers = [Buffer(t, (offset + 3 * i) % 16) for i, t in enumerate(tensors)]
        actual = step(recipe, [b.view for b in buffers], p.offs)
        assert_same_bytes(actual, expected, f"offset {offset}")
        for buffer in buffers:
            buffer.check()


@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_operands_of_expert_mlp_may_begin_at_any_element(recipe, device):
    up, down = (gaussian(SIZES, *nk, tail=3, device=device, seed=2) for nk in ((96, 80), (80, 48)))
    tensors = (up.x, up.w, down.w, down.dy, torch.ones(up.w.shape, device=device), torch.ones(down.w.shape, device=device))

    def run(x, w13, w2, dy, grad13, grad2):
        leaves = [t.detach().requires_grad_() for t in (x, w13, w2)]
        y = moxie.expert_mlp(*leaves, up.offs, recipe=recipe, main_grad13=grad13, main_grad2=grad2)
        y.backward(dy)
        return y.detach(), leaves[0].grad, grad13.clone(), grad2.clone()

    expected = run(*(t.clone() for t in tensors))
    for offset in OFFSETS:
        buffers = [Buffer(t, (offset + 3 * i) % 16) for i, t in enumerate(tensors)]
        assert_same_bytes(run(*(b.view for b in buffers)), expected, f"offset {offset}")
        for buffer in buffers:
            buffer.check()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_of_every_op_may_begin_at_any_element(case: Case, device):
    args, kwargs = case.make(device, 70)
    expected = as_tuple(case.op(*args, **kwargs))

    def move(value, offset, buffers):
        if isinstance(value, list):
            return [move(item, offset, buffers) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        buffers.append(Buffer(value.detach(), (offset + 3 * len(buffers)) % 16))
        return buffers[-1].view

    for offset in (1, 2, 3, 7, 8, 15):
        buffers = []
        moved = [move(value, offset, buffers) for value in args], {k: move(v, offset, buffers) for k, v in kwargs.items()}
        assert_same_bytes(as_tuple(case.op(*moved[0], **moved[1])), expected, f"offset {offset}")
        for buffer in buffers:
            buffer.check()


HAVE_OUT = [case for case in CASES if "out" in getattr(torch.ops.moxie, case.name.split("-")[0]).overloads()]


@pytest.mark.parametrize("case", HAVE_OUT, ids=str)
def test_out_may_begin_at_any_element(case: Case, device):
    op, args, kwargs, names = out_case(case, device)
    op(*args, **kwargs)
    expected = [kwargs[name] for name in names]
    for offset in OFFSETS:
        buffers = {name: Buffer(poisoned(kwargs[name]), (offset + 3 * i) % 16) for i, name in enumerate(names)}
        op(*args, **kwargs | {name: buffer.view for name, buffer in buffers.items()})
        for name, e in zip(names, expected):
            assert_same_bytes(buffers[name].view, e, f"{name}, offset {offset}")
            buffers[name].check()
