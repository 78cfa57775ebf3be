"""Compares quantizers and scale layouts with torchao 0.18, the oracle, byte for byte on random shapes.

Left out by name, because torchao 0.18 departs from the written spec there (test_spec.py has these instead):
infinity anywhere; NaN under floor, ceil and even; even near the largest float; non-zero blocks whose scale code is 0.
"""

import math
import random

import pytest
import torch

import moxie
from support import BLOCKS, RULES, as_bytes, assert_same_bytes, block_shape, e8m0, ragged_offs, random_values, sizes_to_offs

pytest.importorskip("torchao", reason="torchao, the oracle, is not installed")

from torchao.float8.float8_utils import amax_to_scale
from torchao.prototype.moe_training.kernels.mxfp8 import quant as ao
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

DTYPES = (torch.bfloat16, torch.float32)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def oracle(x: torch.Tensor, block: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a matrix with torchao's to_mx in blocks of any shape, filling up edge blocks with zeros. Returns qdata as bytes
    [R, C] and scale codes [R', C']."""
    rows, cols = block_shape(block)
    height, width = round_up(x.shape[0], rows), round_up(x.shape[1], cols)
    full = x.new_zeros(height, width)
    full[: x.shape[0], : x.shape[1]] = x
    tiles = full.view(height // rows, rows, width // cols, cols).transpose(1, 2).reshape(-1, rows * cols)
    if tiles.numel() == 0:
        return torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(height // rows, width // cols, dtype=torch.uint8)
    scale, qdata = to_mx(tiles.contiguous(), torch.float8_e4m3fn, rows * cols, ScaleCalculationMode(rule))
    qdata = as_bytes(qdata).view(height // rows, width // cols, rows, cols).transpose(1, 2).reshape(height, width)
    return qdata[: x.shape[0], : x.shape[1]].contiguous(), as_bytes(scale).view(height // rows, width // cols)


def expected_rowwise(x, offs, block, rule):
    covered = x.shape[0] if offs is None else int(offs[-1])
    x = x.clone()
    x[covered:] = 0  # rows past the last group are quantized to zeros, with scale code 0
    return oracle(x, block, rule)


def expected_colwise(x, offs, block, rule):
    """Quantizes each group with the oracle. Groups lie one after another, each padded to the block, in a buffer whose size
    depends only on the numbers of rows and of groups."""
    rows, cols = block_shape(block)
    ends = [x.shape[0]] if offs is None else offs.tolist()
    padded = (x.shape[0] + len(ends) * (rows - 1)) // rows * rows
    if offs is not None:
        padded = round_up(padded, 256)
    qdata = torch.zeros(x.shape[1], padded, dtype=torch.uint8)
    scale = torch.zeros(math.ceil(x.shape[1] / cols), padded // rows, dtype=torch.uint8)
    begin = at = 0
    for end in ends:
        q, s = oracle(x[begin:end], block, rule)
        qdata[:, at : at + end - begin] = q.T
        scale[:, at // rows : at // rows + s.shape[0]] = s.T
        at += s.shape[0] * rows
        begin = end
    return qdata, scale


def random_shape(rng: random.Random, blocks=BLOCKS):
    rows, cols = rng.choice([rng.randint(1, 300), 32 * rng.randint(1, 8)]), rng.choice([rng.randint(1, 300), 32, 256])
    return rows, cols, rng.choice(blocks)


def check(actual, expected):
    qdata, scale = actual
    assert_same_bytes(as_bytes(qdata), expected[0], "qdata")
    assert_same_bytes(as_bytes(scale), expected[1], "scale")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(60))
def test_quantize_gives_the_bytes_of_to_mx(seed, rule, device):
    rng = random.Random(f"{seed} {rule}")
    rows, cols, block = random_shape(rng)
    x = random_values(rows, cols, dtype=rng.choice(DTYPES), seed=seed)
    if rule == "rceil" and seed % 3 == 0:  # torchao 0.18 loses NaN under the other rules
        x[rng.randrange(rows), rng.randrange(cols)] = math.nan
    offs = ragged_offs(rows, rng.randint(1, 6), rng) if rng.random() < 0.6 else None
    on_device = None if offs is None else offs.to(device)

    if not block.startswith("1x"):
        check(
            moxie.quantize_colwise(x.to(device), offs=on_device, block=block, rule=rule), expected_colwise(x, offs, block, rule)
        )
    tall = not block.startswith("1x")
    if not block.endswith("x1") and not (tall and offs is not None):
        check(
            moxie.quantize_rowwise(x.to(device), offs=on_device, block=block, rule=rule), expected_rowwise(x, offs, block, rule)
        )
    both = moxie.quantize_both(x.to(device), offs=on_device, rule=rule)
    check(both[:2], expected_rowwise(x, offs, "1x32", rule))
    check(both[2:], expected_colwise(x, offs, "32x1", rule))


@pytest.mark.parametrize("seed", range(30))
def test_weights_are_quantized_matrix_by_matrix(seed, device):
    rng = random.Random(seed)
    n, k, _ = random_shape(rng)
    block, rule = rng.choice(("32x32", "128x32", "128x128")), rng.choice(RULES)
    w = random_values(rng.randint(1, 4), n, k, dtype=rng.choice(DTYPES), seed=seed)
    qdata, scale, qdata_t, scale_t = moxie.quantize_both(w.to(device), rowwise_block=block, colwise_block=block, rule=rule)
    for g, matrix in enumerate(w):
        q, s = oracle(matrix, block, rule)
        check((qdata[g], scale[g]), (q, s))
        check((qdata_t[g], scale_t[g]), (q.T.contiguous(), s.T.contiguous()))


@pytest.mark.parametrize("seed", range(20))
def test_dequantize_gives_the_values_of_to_dtype(seed, device):
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    rng = random.Random(seed)
    rows, cols = rng.randint(1, 200), 32 * rng.randint(1, 8)
    x = random_values(rows, cols, seed=seed)
    x[0, 0] = math.nan
    qdata, scale = moxie.quantize_rowwise(x.to(device))
    for dtype in DTYPES:
        expected = to_dtype(qdata.cpu(), scale.cpu(), torch.float8_e4m3fn, 32, dtype)
        actual = moxie.dequantize_rowwise(qdata, scale, dtype=dtype).cpu()
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# ---- layouts of scales ---------------------------------------------------------------------------------------------------


def random_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(40))
def test_swizzle_is_to_blocked(seed, device):
    rng = random.Random(seed)
    rows, cols = rng.randint(1, 300), rng.randint(1, 20)
    codes = random_codes(rows, cols, seed=seed)
    swizzled = moxie.swizzle_scale(e8m0(codes).to(device))
    assert swizzled.shape == (round_up(rows, 128), round_up(cols, 4))
    assert_same_bytes(as_bytes(swizzled).flatten(), to_blocked(codes))
    plain = moxie.unswizzle_scale(swizzled, rows, cols)
    assert_same_bytes(as_bytes(plain), codes)
    assert_same_bytes(as_bytes(plain), from_blocked(as_bytes(swizzled).flatten(), rows, cols))


@pytest.mark.parametrize("seed", range(40))
def test_swizzle_of_row_groups_is_to_blocked_2d_m_groups(seed, device):
    rng = random.Random(seed)
    rows, cols = rng.randint(1, 500), 4 * rng.randint(1, 5)  # a multiple of 4, because torchao's reference does not pad columns
    offs = ragged_offs(rows, rng.randint(1, 6), rng)
    codes = random_codes(rows, cols, seed=seed)
    swizzled = moxie.swizzle_scale(e8m0(codes).to(device), offs=offs.to(device))
    assert_same_bytes(as_bytes(swizzled), ao.torch_to_blocked_2d_M_groups(codes, offs)[0])
    codes[int(offs[-1]) :] = 0
    assert_same_bytes(as_bytes(moxie.unswizzle_scale(swizzled, rows, cols, offs=offs.to(device))), codes)


@pytest.mark.parametrize("seed", range(40))
def test_swizzle_of_contraction_groups_is_to_blocked_2d_k_groups(seed, device):
    rng = random.Random(seed)
    rows, cols = rng.randint(1, 300), rng.randint(1, 40)
    offs = ragged_offs(cols, rng.randint(1, 6), rng)
    codes = random_codes(rows, cols, seed=seed)
    swizzled = moxie.swizzle_scale(e8m0(codes).to(device), offs=offs.to(device), form="colwise")
    assert_same_bytes(as_bytes(swizzled), ao.torch_to_blocked_2d_K_groups(codes, offs)[0])
    codes[:, int(offs[-1]) :] = 0
    plain = moxie.unswizzle_scale(swizzled, rows, cols, offs=offs.to(device), form="colwise")
    assert_same_bytes(as_bytes(plain), codes)


@pytest.mark.parametrize("seed", range(20))
def test_swizzle_of_a_stack_is_to_blocked_per_group_3d(seed, device):
    rng = random.Random(seed)
    codes = random_codes(rng.randint(1, 4), rng.randint(1, 300), rng.randint(1, 20), seed=seed)
    swizzled = moxie.swizzle_scale(e8m0(codes).to(device))
    assert_same_bytes(as_bytes(swizzled), ao.torch_to_blocked_per_group_3d(codes))
    assert_same_bytes(as_bytes(moxie.unswizzle_scale(swizzled, *codes.shape[1:])), codes)


@pytest.mark.parametrize("rule", ("rceil", "floor"))
@pytest.mark.parametrize("seed", range(15))
def test_quantizers_write_the_swizzled_layout_directly(seed, rule, device):
    rng = random.Random(seed)
    rows, cols = rng.randint(1, 400), 128 * rng.randint(1, 3)
    x = random_values(rows, cols, seed=seed)
    offs = ragged_offs(rows, rng.randint(1, 5), rng)
    _, scale, _, scale_t = moxie.quantize_both(x.to(device), offs=offs.to(device), rule=rule, scale_layout="swizzled")
    plain = expected_rowwise(x, offs, "1x32", rule)[1]
    assert_same_bytes(as_bytes(scale), ao.torch_to_blocked_2d_M_groups(plain, offs)[0])
    plain_t = expected_colwise(x, offs, "32x1", rule)[1]
    scale_offs = moxie.padded_offs(offs, 32) // 32
    assert_same_bytes(as_bytes(scale_t), ao.torch_to_blocked_2d_K_groups(plain_t, scale_offs)[0])


@pytest.mark.parametrize("seed", range(15))
def test_swizzled_32x32_scales_of_weights_are_replicated_then_blocked(seed, device):
    rng = random.Random(seed)
    w = random_values(rng.randint(1, 3), 32 * rng.randint(1, 6), 32 * rng.randint(1, 6), seed=seed)
    qdata_t, scale_t = moxie.quantize_colwise(w.to(device), block="32x32", scale_layout="swizzled")
    for g, matrix in enumerate(w):
        q, s = oracle(matrix, "32x32", "rceil")
        assert_same_bytes(as_bytes(qdata_t[g]), q.T.contiguous())
        assert_same_bytes(as_bytes(scale_t[g]), to_blocked(s.T.repeat_interleave(32, dim=0)))


# ---- groups ----------------------------------------------------------------------------------------------------------------


PAD_DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.uint8)


@pytest.mark.parametrize("dtype", PAD_DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_pad_and_unpad_groups_are_those_of_torchao(seed, dtype, device):
    rng = random.Random(f"{seed} {dtype}")
    rows, cols, alignment = rng.randint(1, 300), rng.randint(1, 50), rng.choice([1, 8, 16, 32, 48, 128])
    offs = ragged_offs(rows, rng.randint(1, 9), rng, cover=True)
    x = (torch.randn(rows, cols) * 100).to(dtype)
    expected = ao.torch_pad_token_groups(x, offs, alignment)
    padded, starts, ends = moxie.pad_groups(x.to(device), offs.to(device), alignment)
    assert_same_bytes((padded.cpu(), starts.cpu(), ends.cpu()), expected)
    assert_same_bytes(moxie.padded_offs(offs.to(device), alignment).cpu(), expected[2])
    again = moxie.unpad_groups(padded, offs.to(device), starts, rows).cpu()
    assert_same_bytes(again, ao.torch_unpad_token_groups(*expected[:1], offs, expected[1], rows, alignment))
    assert_same_bytes(again, x)


# ---- FP8 with one scale per row ----------------------------------------------------------------------------------------------


def fp8_rowwise(x: torch.Tensor):
    """Quantizes as torchao's rowwise recipe does. Returns qdata and the decode scale of each row of x."""
    scale = amax_to_scale(x.abs().amax(-1, keepdim=True), torch.float8_e4m3fn, round_scales_to_power_of_2=True)
    qdata = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return qdata, scale.reciprocal().squeeze(-1)


@pytest.mark.parametrize("seed", range(40))
def test_per_row_and_per_col_scales_are_those_of_the_fp8_rowwise_recipe(seed, device):
    rng = random.Random(seed)
    rows, cols = rng.randint(1, 200), rng.randint(1, 200)
    x = random_values(rows, cols, dtype=rng.choice(DTYPES), seed=seed)
    check_pair = lambda actual, expected: assert_same_bytes([t.cpu() for t in actual], expected)
    check_pair(moxie.quantize_per_row(x.to(device)), fp8_rowwise(x))

    sizes = [rng.randint(1, 30) for _ in range(rng.randint(1, 5))]
    x, offs = random_values(sum(sizes), cols, seed=seed), sizes_to_offs(sizes)
    qdata_t = torch.zeros(cols, (sum(sizes) + len(sizes) * 15) // 16 * 16, dtype=torch.uint8)
    scale_t = torch.zeros(len(sizes), cols)
    begin = at = 0
    for g, size in enumerate(sizes):
        qdata, scale_t[g] = fp8_rowwise(x[begin : begin + size].T)
        qdata_t[:, at : at + size] = qdata.view(torch.uint8)
        begin, at = begin + size, at + round_up(size, 16)
    check_pair(moxie.quantize_per_col(x.to(device), offs=offs.to(device)), (qdata_t.view(torch.float8_e4m3fn), scale_t))
