"""The rounding that wire_reference.py derives the accuracy of dw from."""

import pytest
import torch
from torch import Tensor

import moxie
from wire_reference import decibels, rounded_to_fp8

ROWS, COLS = 256, 192
BLOCKS = {"mxfp8_rceil": ("1x32", "32x1"), "mxfp8_rceil_128": ("1x128", "128x1")}


def inputs(kind: str) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLS)
    return x * torch.exp(2 * torch.randn(ROWS, COLS)) if kind == "heavy_tailed" else x


def by_rows(x: Tensor, block: str) -> Tensor:
    """The scale of each element, in blocks of a row."""
    side = int(block.partition("x")[2])
    return moxie.quantize_rowwise(x, block=block)[1].float().repeat_interleave(side, 1)[:, : x.shape[1]]


def by_columns(x: Tensor, block: str) -> tuple[Tensor, Tensor]:
    """x rounded in blocks of a column, and the scale of each element."""
    qdata_t, scale_t = moxie.quantize_colwise(x, block=block)
    rounded = moxie.dequantize_colwise(qdata_t, scale_t, ROWS, block=block, dtype=torch.float32)
    return rounded, scale_t.float().repeat_interleave(int(block.partition("x")[0]), 1)[:, :ROWS].T


@pytest.mark.parametrize("kind", ("normal", "heavy_tailed"))
@pytest.mark.parametrize("recipe", BLOCKS)
def test_rounding_twice_differs_only_where_an_element_is_subnormal(recipe, kind):
    row_block, column_block = BLOCKS[recipe]
    x = inputs(kind)
    sent = rounded_to_fp8(x, recipe)
    over_wire, scale_of_sent = by_columns(sent, column_block)
    alone, scale = by_columns(x, column_block)
    bound = torch.zeros_like(x)
    for value, of in ((x, by_rows(x, row_block)), (x, scale), (sent, scale_of_sent)):
        bound += 2.0**-9 * of * (value.abs() < 2.0**-6 * of)
    assert ((over_wire - alone).abs() <= bound).all()
    assert 0 < (bound > 0).double().mean() < (0.5 if kind == "heavy_tailed" else 0.002)
    # Products with another operand: largest and actual differences.
    dy = torch.randn(ROWS, 64).double()
    dw = dy.T @ alone.double()
    largest = decibels(dw + dy.abs().T @ bound.double(), dw)
    actual = decibels(dy.T @ over_wire.double(), dw)
    print(f"{recipe} {kind}: {(bound > 0).double().mean():.2%} subnormal, dw at least {largest:.1f} dB, has {actual:.1f} dB")


@pytest.mark.parametrize("kind", ("normal", "heavy_tailed"))
@pytest.mark.parametrize("recipe", (*BLOCKS, "mxfp8_floor"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_tokens_that_were_rounded_stay_as_they_are(recipe, kind, dtype):
    sent = rounded_to_fp8(inputs(kind).to(dtype), recipe)
    assert torch.equal(rounded_to_fp8(sent, recipe), sent)
