"""Blocks and the bytes that the spec (docs/NUMERICS.md) requires for them, above all where torchao 0.18 gives others."""

import math
import struct

import pytest
import torch

import moxie
from support import COLWISE_BLOCKS, RULES, as_bytes, assert_same_bytes, random_values, sizes_to_offs

BF16, F32 = torch.bfloat16, torch.float32
NAN = 0x7F


def from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


LARGEST = {BF16: from_bits(0x7F7F0000), F32: from_bits(0x7F7FFFFF)}
SMALLEST = {BF16: from_bits(0x00010000), F32: from_bits(0x00000001)}  # subnormal
ANY, BOTH = RULES, (BF16, F32)

# (name, rules, dtypes, first elements, value of the others) -> (scale code, bytes of the first elements, byte of the others)
VECTORS = [
    ("zeros", ANY, BOTH, [-0.0], 0.0, 0, [0x80], 0x00),
    ("the smallest normal", ANY, BOTH, [], 2.0**-126, 0, [], 0x40),
    ("448", ("rceil", "floor"), BOTH, [-448.0], 448.0, 127, [0xFE], 0x7E),
    ("448 rounded up", ("ceil",), BOTH, [-448.0], 448.0, 128, [0xF6], 0x76),
    ("480 under floor clips", ("floor",), BOTH, [-480.0], 480.0, 127, [0xFE], 0x7E),
    ("480 under rceil does not", ("rceil",), BOTH, [-480.0], 480.0, 128, [0xF7], 0x77),
    ("one ulp above 3.5", ("rceil",), (F32,), [], from_bits(0x40600001), 121, [], 0x76),
    ("one ulp above 3.5", ("floor",), (F32,), [], from_bits(0x40600001), 120, [], 0x7E),
    ("one ulp below 512", ("floor",), (F32,), [], from_bits(0x43FFFFFF), 127, [], 0x7E),
    ("one ulp below 512", ("rceil", "ceil", "even"), (F32,), [], from_bits(0x43FFFFFF), 128, [], 0x78),
    ("ones beside the smallest subnormal", ("rceil", "floor"), BOTH, ["smallest", "-smallest"], 1.0, 119, [0x00, 0x80], 0x78),
    ("ones beside the largest", ("rceil",), BOTH, ["largest"], 1.0, 247, [0x78], 0x00),
    ("ones beside the largest", ("floor",), BOTH, ["largest"], 1.0, 246, [0x7E], 0x00),
    ("the largest", ("rceil",), BOTH, ["-largest"], "largest", 247, [0xF8], 0x78),
    ("the largest", ("floor",), BOTH, ["-largest"], "largest", 246, [0xFE], 0x7E),
    # Where even rounds a maximum up to infinity, torchao 0.18 gives a finite scale.
    ("the largest overflows even", ("even",), BOTH, [1.0], "largest", 255, [NAN], NAN),
    ("1.9375 * 2^127 overflows even", ("even",), BOTH, [1.0], from_bits(0x7F780000), 255, [NAN], NAN),
    ("just below it does not", ("even",), (F32,), [], from_bits(0x7F77FFFF), 246, [], 0x7E),
    # torchao 0.18 gives infinity a scale that is not NaN, and keeps NaN only under rceil.
    ("infinity", ANY, BOTH, [math.inf], 1.0, 255, [NAN], NAN),
    ("minus infinity", ANY, BOTH, [0.0, -math.inf], 1.0, 255, [NAN, NAN], NAN),
    ("NaN", ANY, BOTH, [1.0, math.nan], 1.0, 255, [NAN, NAN], NAN),
    ("NaN beside infinity", ANY, BOTH, [math.inf, math.nan], 0.0, 255, [NAN, NAN], NAN),
    # torchao 0.18 decodes scale code 0 as 2^-126 (floor, ceil, even) or 1 (rceil), not as 2^-127.
    ("the smallest subnormal bf16", ANY, BOTH, [-SMALLEST[BF16]], SMALLEST[BF16], 0, [0x88], 0x08),
    ("the smallest subnormal f32 rounds to 0", ANY, (F32,), [-SMALLEST[F32]], SMALLEST[F32], 0, [0x80], 0x00),
    ("a subnormal mantissa", ANY, BOTH, [3 * 2.0**-128], 2.0**-127, 0, [0x3C], 0x38),
    ("448 * 2^-127", ("rceil", "floor"), BOTH, [], 448 * 2.0**-127, 0, [], 0x7E),
    # The only case in which rceil's scale is below amax / 448: in f32 the quotient rounds down to exactly 2^-127, code 0.
    ("one ulp above 448 * 2^-127", ("rceil",), (F32,), [], from_bits(0x04600001), 0, [], 0x7E),
    ("two ulps above it", ("rceil",), (F32,), [], from_bits(0x04600002), 1, [], 0x76),
    ("512 * 2^-127", ("floor", "ceil", "even"), BOTH, [], 2.0**-118, 1, [], 0x78),
]
CASES = [
    pytest.param(rule, dtype, *vector[3:], id=f"{vector[0]}-{rule}-{dtype}".replace(" ", "_"))
    for vector in VECTORS
    for rule in vector[1]
    for dtype in vector[2]
]


@pytest.mark.parametrize("rule, dtype, first, fill, code, first_bytes, fill_byte", CASES)
def test_a_block_has_the_bytes_of_the_spec(rule, dtype, first, fill, code, first_bytes, fill_byte, device):
    names = {"largest": LARGEST[dtype], "-largest": -LARGEST[dtype], "smallest": SMALLEST[dtype], "-smallest": -SMALLEST[dtype]}
    values = [names.get(value, value) for value in [*first, *[fill] * (32 - len(first))]]
    expected = torch.tensor([*first_bytes, *[fill_byte] * (32 - len(first))], dtype=torch.uint8)
    block = torch.tensor(values, dtype=dtype, device=device)
    # A block of ones on either side shows that the block does not affect its neighbours.
    x = torch.cat([torch.ones_like(block), block, torch.ones_like(block)])

    qdata, scale = moxie.quantize_rowwise(x[None], rule=rule)
    qdata_t, scale_t = moxie.quantize_colwise(x[:, None], rule=rule)
    for bytes_, codes in ((as_bytes(qdata), as_bytes(scale)), (as_bytes(qdata_t), as_bytes(scale_t))):
        assert codes[0].tolist() == [119, code, 119]
        assert bytes_[0, 32:64].tolist() == expected.tolist()
        assert (bytes_[0, :32] == 0x78).all() and (bytes_[0, 64:] == 0x78).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_one_bad_element_spoils_its_block_in_every_block_shape(bad, rule, device):
    x = torch.ones(2, 256, 256, device=device)
    x[1, 200, 77] = bad
    for block, name in (("32x32", "rowwise"), ("128x128", "rowwise"), ("128x32", "colwise"), ("32x1", "colwise")):
        rows, cols = map(int, block.split("x"))
        quantize = moxie.quantize_rowwise if name == "rowwise" else moxie.quantize_colwise
        qdata, scale = quantize(x, block=block, rule=rule)
        is_nan = as_bytes(qdata) == NAN
        if name == "colwise":
            is_nan = is_nan.mT
        expected = torch.zeros(2, 256, 256, dtype=torch.bool)
        top, left = 200 // rows * rows, 77 // cols * cols
        expected[1, top : top + rows, left : left + cols] = True
        assert torch.equal(is_nan, expected)
        assert (as_bytes(scale) == 255).sum() == 1


def test_every_scale_code_and_element_dequantizes_to_its_value(device):
    codes = torch.arange(256, dtype=torch.uint8)
    qdata = codes.repeat_interleave(32).view(256, 32).T.contiguous()  # [32, 256]: column c holds the e4m3 code c, 32 times
    values = qdata.view(torch.float8_e4m3fn).double()
    for code in range(256):
        scale = torch.full((32, 8), code, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
        expected = values * 2.0 ** (code - 127) if code != 255 else torch.full_like(values, math.nan)
        for dtype in (F32, BF16):
            actual = moxie.dequantize_rowwise(qdata.view(torch.float8_e4m3fn).to(device), scale, dtype=dtype)
            # converting f64 to f32 is exact here unless it overflows; bf16 is rounded from that f32
            torch.testing.assert_close(actual.cpu(), expected.float().to(dtype), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(actual.cpu().sign(), expected.float().to(dtype).sign(), rtol=0, atol=0, equal_nan=True)


def test_requantize_is_dequantize_to_f32_then_quantize(device):
    x = random_values(300, 200, device=device)
    offs = sizes_to_offs([0, 100, 33, 1, 160], device)
    for block in ("1x32", "1x128"):
        qdata, scale = moxie.quantize_rowwise(x, offs=offs, block=block)
        hp = moxie.dequantize_rowwise(qdata, scale, offs=offs, block=block, dtype=F32)
        for colwise_block in COLWISE_BLOCKS:
            for rule in RULES:
                actual = moxie.requantize(qdata, scale, offs=offs, block=block, colwise_block=colwise_block, rule=rule)
                expected = moxie.quantize_colwise(hp, offs=offs, block=colwise_block, rule=rule)
                assert_same_bytes(actual, expected, f"{block} {colwise_block} {rule}")


@pytest.mark.parametrize("sizes", ([0, 100, 33, 1, 128, 38], [3] * 100, [], None), ids=("ragged", "many", "one", "weights"))
def test_swizzled_scales_are_read_as_plain_ones_are(sizes, device):
    x = random_values(*(300, 200) if sizes is not None else (3, 100, 200), device=device)
    x.view(-1)[5], x.view(-1)[7000] = math.nan, math.inf
    offs = sizes_to_offs(sizes, device) if sizes else None
    for block in ("1x32", "1x128") if sizes else ("1x32", "1x128", "32x32", "128x128"):
        plain, swizzled = (
            moxie.quantize_rowwise(x, offs=offs, block=block, scale_layout=layout) for layout in ("plain", "swizzled")
        )
        assert plain[1].shape != swizzled[1].shape
        for dtype in (F32, BF16):
            kwargs = {"offs": offs, "block": block, "dtype": dtype}
            assert_same_bytes(
                [moxie.dequantize_rowwise(*swizzled, scale_layout="swizzled", **kwargs)],
                [moxie.dequantize_rowwise(*plain, **kwargs)],
                block,
            )
        for colwise_block in COLWISE_BLOCKS:
            for layout in ("plain", "swizzled"):
                kwargs = {"offs": offs, "block": block, "colwise_block": colwise_block, "scale_layout": layout}
                assert_same_bytes(
                    moxie.requantize(*swizzled, from_layout="swizzled", **kwargs),
                    moxie.requantize(*plain, **kwargs),
                    f"{block} {colwise_block} {layout}",
                )
    for block in COLWISE_BLOCKS:
        plain, swizzled = (
            moxie.quantize_colwise(x, offs=offs, block=block, scale_layout=layout) for layout in ("plain", "swizzled")
        )
        assert plain[1].shape != swizzled[1].shape
        for dtype in (F32, BF16):
            kwargs = {"offs": offs, "block": block, "dtype": dtype}
            assert_same_bytes(
                [moxie.dequantize_colwise(*swizzled, x.shape[-2], scale_layout="swizzled", **kwargs)],
                [moxie.dequantize_colwise(*plain, x.shape[-2], **kwargs)],
                block,
            )


@pytest.mark.parametrize("shape", ((128, 128), (256, 384)), ids=str)
def test_scales_whose_shape_is_that_of_both_layouts_are_read_as_the_call_says(shape, device):
    x = random_values(*shape, device=device)
    qdata, scale, qdata_t, scale_t = moxie.quantize_both(x)
    _, swizzled, _, swizzled_t = moxie.quantize_both(x, scale_layout="swizzled")
    for a, b in ((swizzled, scale), (swizzled_t, scale_t)):
        assert a.shape == b.shape and not torch.equal(as_bytes(a), as_bytes(b))

    said = {"scale_layout": "swizzled"}
    rowwise = moxie.dequantize_rowwise(qdata, scale, dtype=F32)
    colwise = moxie.dequantize_colwise(qdata_t, scale_t, shape[0], dtype=F32)
    for back in (rowwise, colwise):
        assert (back - x.float()).abs().max() <= x.float().abs().max() / 16
    for kwargs in ({"dtype": F32}, {"out": torch.empty_like(rowwise)}):
        assert_same_bytes([moxie.dequantize_rowwise(qdata, swizzled, **said, **kwargs)], [rowwise])
        assert_same_bytes([moxie.dequantize_colwise(qdata_t, swizzled_t, shape[0], **said, **kwargs)], [colwise])
    for layout in ("plain", "swizzled"):  # of the result
        expected = moxie.requantize(qdata, scale, scale_layout=layout)
        for kwargs in ({}, {"out": tuple(map(torch.empty_like, expected))}):
            actual = moxie.requantize(qdata, swizzled, from_layout="swizzled", scale_layout=layout, **kwargs)
            assert_same_bytes(actual, expected, layout)
