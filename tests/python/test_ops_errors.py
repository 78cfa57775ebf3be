"""Bad calls of ops: the exception names the op as it was called, the rule and the value, and no output is written."""

import pytest
import torch

import moxie
from support import CASES, as_bytes, e8m0, out_case, random_values, sizes_to_offs

X = torch.zeros(70, 96, dtype=torch.bfloat16)
W = torch.zeros(3, 64, 96)
OFFS = sizes_to_offs([30, 0, 40])
QDATA = torch.zeros(70, 96, dtype=torch.float8_e4m3fn)
SCALE = e8m0(torch.zeros(70, 3))
SWIZZLED = moxie.swizzle_scale(SCALE)
QDATA_T, SCALE_T = moxie.quantize_colwise(X, offs=OFFS)
W_QDATA, W_SWIZZLED = moxie.quantize_rowwise(W, scale_layout="swizzled")
PADDED, STARTS, _ = moxie.pad_groups(X, OFFS)


def offs(*ends: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


# (op, args, kwargs) -> (exception, parts of its message after "op: ")
# fmt: off
BAD_CALLS = [
    # dtypes
    ("quantize_rowwise", (X.half(),), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.float16"),
    ("quantize_colwise", (X.int(),), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.int32"),
    ("quantize_both", (QDATA,), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.float8_e4m3fn"),
    ("quantize_per_row", (X.double(),), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.float64"),
    ("dequantize_rowwise", (X, SCALE), {}, TypeError, "qdata must be torch.float8_e4m3fn, got torch.bfloat16"),
    ("dequantize_rowwise", (QDATA, SCALE.view(torch.uint8)), {}, TypeError,
     "scale must be torch.float8_e8m0fnu, got torch.uint8", ".view(torch.float8_e8m0fnu)"),
    ("dequantize_rowwise", (QDATA, torch.zeros(70, 3)), {}, TypeError,
     "scale must be torch.float8_e8m0fnu, got torch.float32"),
    ("dequantize_colwise", (QDATA_T, SCALE_T.view(torch.uint8), 70), {"offs": OFFS}, TypeError,
     "scale_t must be torch.float8_e8m0fnu, got torch.uint8"),
    ("dequantize_rowwise", (QDATA, SCALE), {"dtype": torch.float16}, TypeError,
     "dtype must be torch.bfloat16 or torch.float32, got torch.float16"),
    ("requantize", (QDATA.view(torch.uint8), SCALE), {}, TypeError, "qdata must be torch.float8_e4m3fn, got torch.uint8"),
    ("swizzle_scale", (SCALE.view(torch.uint8),), {}, TypeError, "scale must be torch.float8_e8m0fnu, got torch.uint8"),
    ("unswizzle_scale", (X, 70, 3), {}, TypeError, "swizzled must be torch.float8_e8m0fnu, got torch.bfloat16"),
    # shapes
    ("quantize_rowwise", (X[0],), {}, ValueError, "x must be a matrix or a stack of matrices (2 or 3 dims), got 1 dims"),
    ("quantize_per_col", (W[None],), {}, ValueError, "x must be a matrix or a stack of matrices", "got 4 dims"),
    ("dequantize_rowwise", (QDATA, SCALE[:5]), {}, ValueError, "scale must be [70, 3], got [5, 3]"),
    ("dequantize_rowwise", (QDATA, SCALE), {"block": "32x32"}, ValueError, "scale must be [3, 3], got [70, 3]"),
    ("dequantize_rowwise", (QDATA, SCALE[0]), {}, ValueError, "scale must be [70, 3], got [3]"),
    ("dequantize_colwise", (QDATA_T, SCALE_T[:5], 70), {"offs": OFFS}, ValueError, "scale_t must be [96, 8], got [5, 8]"),
    ("dequantize_colwise", (QDATA_T, SCALE_T, 700), {"offs": OFFS}, ValueError, "qdata_t must be [96, 768], got [96, 256]"),
    ("dequantize_colwise", (QDATA_T, SCALE_T, -1), {"offs": OFFS}, ValueError, "num_rows must not be negative, got -1"),
    ("requantize", (QDATA, SCALE[:, :2]), {}, ValueError, "scale must be [70, 3], got [70, 2]"),
    # the other layout
    ("dequantize_rowwise", (QDATA, SWIZZLED), {}, ValueError,
     "scale must be [70, 3], got [128, 4], which has the shape of swizzled scales; pass scale_layout='swizzled'"),
    ("dequantize_rowwise", (QDATA, SCALE), {"scale_layout": "swizzled"}, ValueError,
     "scale must be [128, 4], got [70, 3], which has the shape of plain scales; pass scale_layout='plain'"),
    ("dequantize_rowwise", (QDATA, SWIZZLED), {"out": X.clone()}, ValueError,
     "which has the shape of swizzled scales; pass scale_layout='swizzled'"),
    ("dequantize_colwise", (QDATA_T, SCALE_T, 70), {"offs": OFFS, "scale_layout": "swizzled"}, ValueError,
     "scale_t must be [128, 20], got [96, 8], which has the shape of plain scales, or of swizzled ones that were made "
     "without offs"),
    ("dequantize_colwise", (QDATA_T, SCALE_T[:5], 70), {"offs": OFFS, "scale_layout": "swizzled"}, ValueError,
     "scale_t must be [128, 20], got [5, 8]"),
    ("dequantize_rowwise", (W_QDATA, W_SWIZZLED), {}, ValueError,
     "scale must be [3, 64, 3], got [3, 512], which has the shape of swizzled scales; pass scale_layout='swizzled'"),
    ("requantize", (QDATA, SWIZZLED), {"scale_layout": "swizzled"}, ValueError,
     "scale must be [70, 3], got [128, 4], which has the shape of swizzled scales; pass from_layout='swizzled'"),
    ("requantize", (QDATA, SCALE), {"from_layout": "swizzled"}, ValueError,
     "scale must be [128, 4], got [70, 3], which has the shape of plain scales; pass from_layout='plain'"),
    ("swizzle_scale", (SCALE[0],), {}, ValueError, "scale must be a matrix or a stack", "got 1 dims"),
    ("unswizzle_scale", (SCALE, 70, 3), {}, ValueError, "swizzled must be [128, 4], or [groups, 512] for a stack, got [70, 3]"),
    ("unswizzle_scale", (SCALE, 70, -3), {}, ValueError, "cols must not be negative, got -3"),
    ("replicate_scale", (SCALE, 70, 96), {"block": "32x32"}, ValueError, "scale must be [3, 3], got [70, 3]"),
    ("pad_groups", (W, OFFS), {}, ValueError, "x must be [rows, cols], got 3 dims"),
    ("unpad_groups", (PADDED, OFFS, STARTS[:2], 70), {}, ValueError, "starts must be [3], got [2]"),
    ("unpad_groups", (PADDED, OFFS, STARTS, -4), {}, ValueError, "num_rows must not be negative", "got -4"),
    ("unpad_groups", (PADDED, OFFS, STARTS, 2**40), {}, ValueError, "num_rows must", "fit the int32 of offs, got 1099511627776"),
    ("unpad_groups", (torch.zeros(()), OFFS, STARTS, 3), {}, ValueError, "padded must be [rows, cols], got 0 dims"),
    ("pad_groups", (X, OFFS, 2**31), {}, ValueError, "alignment must be 1 to 2097151, got 2147483648"),
    ("pad_groups", (torch.empty(2**31 - 5, 1, device="meta"), OFFS.to("meta")), {}, ValueError, "padded rows must"),
    # None where a tensor belongs
    ("pad_groups", (X, None), {}, TypeError, "offs must be a tensor, got None"),
    ("dequantize_rowwise", (QDATA, None), {}, TypeError, "scale must be a tensor, got None"),
    ("quantize_rowwise", (X,), {"out": (None, None)}, TypeError, "qdata must be a tensor, got None"),
    ("quantize_rowwise", (X,), {"out": (QDATA,)}, ValueError, "out must be the tensors (qdata, scale), got 1"),
    ("dequantize_rowwise", (QDATA, SCALE), {"dtype": torch.float32, "out": X.clone()}, ValueError,
     "dtype must be that of out, torch.bfloat16, got torch.float32"),
    # blocks, rules, layouts, forms, alignments
    ("quantize_rowwise", (X,), {"block": "3x3"}, ValueError,
     "block must be one of 1x32, 32x1, 32x32, 1x128, 128x1, 128x32, 128x128, got '3x3'"),
    ("quantize_both", (X,), {"colwise_block": "64x1"}, ValueError, "colwise_block must be one of", "got '64x1'"),
    ("quantize_rowwise", (X,), {"block": "32x1"}, ValueError, "at least 32 of them, got 32x1"),
    ("quantize_colwise", (X,), {"block": "1x128"}, ValueError, "at least 32 of them, got 1x128"),
    ("quantize_rowwise", (X,), {"block": "32x32", "offs": OFFS}, ValueError,
     "with offs a rowwise block must be one row tall (1x32 or 1x128), got 32x32"),
    ("requantize", (QDATA, SCALE), {"colwise_block": "1x32"}, ValueError, "at least 32 of them, got 1x32"),
    ("replicate_scale", (SCALE, 70, 96), {"block": "128x1"}, ValueError, "at least 32 of them, got 128x1"),
    ("quantize_rowwise", (X,), {"rule": "round"}, ValueError, "rule must be one of rceil, floor, ceil, even, got 'round'"),
    ("quantize_colwise", (X,), {"scale_layout": "blocked"}, ValueError,
     "scale_layout must be plain, swizzled or quads, got 'blocked'"),
    ("dequantize_rowwise", (QDATA, SCALE), {"scale_layout": "blocked"}, ValueError,
     "scale_layout must be plain, swizzled or quads, got 'blocked'"),
    ("requantize", (QDATA, SCALE), {"from_layout": "blocked"}, ValueError,
     "from_layout must be plain, swizzled or quads, got 'blocked'"),
    ("swizzle_scale", (SCALE,), {"form": "rows"}, ValueError, "form must be rowwise or colwise, got 'rows'"),
    ("pad_groups", (X, OFFS, 0), {}, ValueError, "alignment must be", "got 0"),
    ("padded_offs", (OFFS, 2**31), {}, ValueError, "alignment must be", "got 2147483648"),
    # offs
    ("quantize_rowwise", (X,), {"offs": OFFS.long()}, TypeError, "offs must be torch.int32, got torch.int64",
     ".to(torch.int32)"),
    ("pad_groups", (X, OFFS.float()), {}, TypeError, "offs must be torch.int32, got torch.float32"),
    ("quantize_both", (X,), {"offs": OFFS[None]}, ValueError, "offs must be [groups], got 2 dims"),
    ("quantize_both", (X,), {"offs": OFFS[:0]}, ValueError, "offs must hold 1 to 1024 groups, got 0"),
    ("quantize_both", (X,), {"offs": torch.full((1025,), 70, dtype=torch.int32)}, ValueError,
     "offs must hold 1 to 1024 groups, got 1025"),
    ("quantize_colwise", (W,), {"offs": OFFS}, ValueError, "a stack of matrices takes no offs"),
    ("quantize_rowwise", (X,), {"offs": offs(10, 5, 70)}, ValueError, "offs must not decrease", "got 5 after 10 at group 1"),
    ("quantize_colwise", (X,), {"offs": offs(-1, 70)}, ValueError, "offs must not decrease and start at 0 or above",
     "got -1"),
    ("quantize_both", (X,), {"offs": offs(10, 71)}, ValueError, "offs must not pass the end of the 70 rows, got 71"),
    ("dequantize_rowwise", (QDATA, SCALE), {"offs": offs(71)}, ValueError, "offs must not pass the end of the 70 rows"),
    ("dequantize_colwise", (QDATA_T, SCALE_T, 70), {"offs": offs(9, 3, 70)}, ValueError, "offs must not decrease"),
    ("requantize", (QDATA, SCALE), {"offs": offs(3, 2)}, ValueError, "offs must not decrease"),
    ("quantize_per_row", (X,), {"offs": offs(3, 2)}, ValueError, "offs must not decrease"),
    ("quantize_per_col", (X,), {"offs": offs(3, 99)}, ValueError, "offs must not pass the end of the 70 rows, got 99"),
    ("swizzle_scale", (SCALE,), {"offs": offs(71)}, ValueError, "offs must not pass the end of the 70 rows"),
    ("swizzle_scale", (SCALE,), {"offs": offs(4), "form": "colwise"}, ValueError,
     "offs must not pass the end of the 3 scale columns, got 4"),
    ("pad_groups", (X, offs(5, 4)), {}, ValueError, "offs must not decrease"),
    ("unpad_groups", (PADDED, offs(30, 30, 71), STARTS, 70), {}, ValueError, "offs must not pass the end of the 70 rows"),
    ("unpad_groups", (PADDED, OFFS, STARTS + 160, 70), {}, ValueError,
     "group 2 must lie inside the 192 padded rows, got start 192 for 40 rows"),
    ("padded_offs", (offs(5, 4),), {}, ValueError, "offs must not decrease"),
    # values
    ("compact_scale", (e8m0(torch.arange(64).view(32, 2)),), {"block": "32x32"}, ValueError,
     "scales must be constant in each 32x32 block", "at row 1, column 0"),
]
# fmt: on


@pytest.mark.parametrize(
    "op, args, kwargs, exception, parts",
    [pytest.param(*call[:4], call[4:], id=f"{call[0]}-{i}") for i, call in enumerate(BAD_CALLS)],
)
def test_a_bad_call_says_the_op_the_rule_and_the_value(op, args, kwargs, exception, parts):
    with pytest.raises(exception) as caught:
        getattr(moxie, op)(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"{op}: "), message
    for part in parts:
        assert part in message


def test_mixed_devices_are_refused():
    with pytest.raises(ValueError, match="quantize_rowwise: all tensors must be on one device, got offs on meta beside cpu"):
        moxie.quantize_rowwise(X, offs=OFFS.to("meta"))
    with pytest.raises(ValueError, match="requantize: all tensors must be on one device, got scale on meta"):
        moxie.requantize(QDATA, SCALE.view(torch.uint8).to("meta").view(torch.float8_e8m0fnu))
    with pytest.raises(ValueError, match="pad_groups: all tensors must be on one device"):
        moxie.pad_groups(X, OFFS.to("meta"))


# ---- outputs that the caller brings ----------------------------------------------------------------------------------------


def outputs():
    return {"qdata": torch.zeros_like(QDATA), "scale": e8m0(torch.zeros(70, 3))}


# fmt: off
BAD_OUTPUTS = [
    ("wrong dtype", {"qdata": torch.zeros(70, 96)}, TypeError, "qdata must be torch.float8_e4m3fn, got torch.float32"),
    ("scale in f32", {"scale": torch.zeros(70, 3)}, TypeError, "scale must be torch.float8_e8m0fnu, got torch.float32"),
    ("too few rows", {"qdata": QDATA[:5]}, ValueError, "qdata must be [70, 96], got [5, 96]"),
    ("too many dims", {"scale": SCALE[None]}, ValueError, "scale must be [70, 3], got [1, 70, 3]"),
    ("strided", {"qdata": torch.zeros(96, 70, dtype=torch.float8_e4m3fn).T}, ValueError, "qdata is written in place"),
    ("on another device", {"qdata": torch.empty_like(QDATA, device="meta")}, ValueError, "on one device, got qdata on meta"),
]
# fmt: on


@pytest.mark.parametrize("bad, exception, part", [pytest.param(*case[1:], id=case[0]) for case in BAD_OUTPUTS])
def test_a_bad_output_is_refused(bad, exception, part):
    with pytest.raises(exception) as caught:
        torch.ops.moxie.quantize_rowwise.out(X, **{**outputs(), **bad})
    assert str(caught.value).startswith("quantize_rowwise: ") and part in str(caught.value)


def test_an_output_that_shares_memory_is_refused():
    memory = torch.zeros(70 * 96 * 2, dtype=torch.uint8)
    x = memory.view(torch.bfloat16).view(70, 96)
    inside = memory[100 : 100 + 70 * 96].view(torch.float8_e4m3fn).view(70, 96)
    with pytest.raises(ValueError, match="quantize_rowwise: qdata shares memory with input 1"):
        moxie.quantize_rowwise(x, out=(inside, outputs()["scale"]))
    same = memory[: 70 * 96].view(torch.float8_e4m3fn)
    scale = memory[70 * 96 - 10 : 70 * 96 + 200].view(torch.float8_e8m0fnu).view(70, 3)
    with pytest.raises(ValueError, match="quantize_rowwise: scale shares memory with qdata"):
        moxie.quantize_rowwise(X, out=(same.view(70, 96), scale))


def test_an_output_that_is_a_lazy_conjugate_or_negative_is_refused():
    padded = torch.randn(5, 4, dtype=torch.complex64)
    for _ in range(20):  # without the check, torch's fallback for conjugates would corrupt the heap
        with pytest.raises(ValueError, match="unpad_groups: x .* must not be a lazy conjugate or negative"):
            moxie.unpad_groups(padded, offs(5), offs(0), 5, out=torch.zeros_like(padded).conj())
    with pytest.raises(ValueError, match="dequantize_rowwise: x .* must not be a lazy conjugate or negative"):
        moxie.dequantize_rowwise(QDATA, SCALE, out=torch._neg_view(torch.zeros(70, 96)))


def test_an_input_that_is_a_lazy_conjugate_or_negative_is_read_as_what_it_stands_for():
    padded, x = torch.randn(5, 4, dtype=torch.complex64), torch.randn(70, 96)
    out = torch.empty_like(padded)
    assert torch.equal(moxie.unpad_groups(padded.conj(), offs(5), offs(0), 5, out=out), padded.conj().resolve_conj())
    expected = moxie.quantize_rowwise(-x)
    actual = moxie.quantize_rowwise(torch._neg_view(x), out=(torch.empty_like(QDATA), torch.empty_like(SCALE)))
    for a, b in zip(actual, expected):
        assert torch.equal(as_bytes(a), as_bytes(b))


def test_an_inference_tensor_is_written_in_inference_mode_only():
    with torch.inference_mode():
        out = torch.empty(70, 96)
        moxie.dequantize_rowwise(QDATA, SCALE, out=out)
    with pytest.raises(ValueError, match="dequantize_rowwise: x is an inference tensor"):
        moxie.dequantize_rowwise(QDATA, SCALE, out=out)


def test_an_output_that_requires_grad_is_refused():
    x = torch.zeros(70, 96, requires_grad=True)
    with pytest.raises(ValueError, match="dequantize_rowwise: x is written in place and must not require grad"):
        moxie.dequantize_rowwise(QDATA, SCALE, out=x)
    with torch.no_grad():
        moxie.dequantize_rowwise(QDATA, SCALE, out=x)


@pytest.mark.parametrize("name", ("quantize_both", "dequantize_colwise", "requantize", "pad_groups", "unpad_groups"))
def test_a_failed_call_leaves_its_outputs_untouched(name):
    case = next(case for case in CASES if case.name == name)
    op, args, kwargs, names = out_case(case, "cpu")
    bad = torch.tensor([5, 3, 38, 70], dtype=torch.int32)  # these ends decrease, which an op sees only when it reads them
    if "offs" in kwargs or name == "requantize":
        kwargs["offs"] = bad
    else:
        args = (args[0], bad, *args[2:])
    if name == "requantize":  # offs has four groups, so the buffers must fit four, or the call fails before it reads offs
        results = torch.ops.moxie.requantize(*args, offs=sizes_to_offs([5, 0, 33, 32]))
        kwargs |= {name: random_bytes_like(t) for name, t in zip(names, results)}
    before = [as_bytes(kwargs[name]).clone() for name in names]
    with pytest.raises(ValueError, match=f"{name}: offs must not decrease"):
        op(*args, **kwargs)
    for name, expected in zip(names, before):
        assert torch.equal(as_bytes(kwargs[name]), expected), name


def random_bytes_like(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.empty_like(tensor)
    other.view(torch.uint8).random_(0, 255)
    return other


def test_scales_may_be_written_as_bytes():
    x = random_values(70, 96)
    codes = torch.zeros(70, 3, dtype=torch.uint8)
    moxie.quantize_rowwise(x, out=(torch.zeros_like(QDATA), codes))
    assert torch.equal(codes, as_bytes(moxie.quantize_rowwise(x)[1]))
