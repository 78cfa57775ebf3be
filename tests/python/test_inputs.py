"""All kinds of legal inputs: strided, expanded, empty, many groups, arbitrary values in padding, and tensors with gradients."""

import math

import pytest
import torch

import moxie
from support import CASES, Case, as_bytes, as_tuple, assert_same_bytes, call, random_values, sizes_to_offs

# ---- strides -----------------------------------------------------------------------------------------------------------------


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values in a tensor with gaps between elements and an offset, so that it is not contiguous."""
    big = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3, dtype=torch.uint8, device=tensor.device)
    if tensor.element_size() != 1:
        big = big.to(tensor.dtype)
    else:
        big = big.view(tensor.dtype)
    view = big[..., 3::2]
    view.view(torch.uint8).copy_(tensor.view(torch.uint8)) if tensor.element_size() == 1 else view.copy_(tensor)
    assert not view.is_contiguous() or view.numel() <= 1
    return view


@pytest.mark.parametrize("case", CASES, ids=str)
def test_strided_inputs_give_the_same_bytes(case: Case, device):
    args, kwargs = case.make(device, 70)
    expected = as_tuple(case.op(*args, **kwargs))
    change = lambda value: strided(value) if isinstance(value, torch.Tensor) else value
    actual = case.op(*map(change, args), **{name: change(value) for name, value in kwargs.items()})
    assert_same_bytes(as_tuple(actual), expected)


def test_transposed_and_expanded_inputs_are_copied_as_need_be(device):
    x = random_values(96, 70, device=device)
    assert_same_bytes(moxie.quantize_both(x.T), moxie.quantize_both(x.T.contiguous()))
    row = random_values(1, 96, device=device)
    assert_same_bytes(moxie.quantize_both(row.expand(70, 96)), moxie.quantize_both(row.repeat(70, 1)))
    w = random_values(64, 3, 96, device=device).transpose(0, 1)
    assert_same_bytes(moxie.quantize_both(w), moxie.quantize_both(w.contiguous()))


# ---- sizes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 96), (70, 0), (0, 0), (0, 64, 96), (3, 0, 96), (3, 64, 0)], ids=str)
def test_empty_tensors_give_empty_results(shape, device):
    x = torch.zeros(shape, device=device)
    grouped = {"offs": torch.zeros(2, dtype=torch.int32, device=device)} if len(shape) == 2 else {}
    for kwargs in ({}, grouped):
        for layout in ("plain", "swizzled"):
            results = moxie.quantize_both(x, scale_layout=layout, **kwargs)
            assert all((as_bytes(t) == 0).all() for t in results)
        qdata, scale, qdata_t, scale_t = moxie.quantize_both(x, **kwargs)
        assert qdata.shape == shape
        assert moxie.dequantize_rowwise(qdata, scale, **kwargs).shape == shape
        assert moxie.dequantize_colwise(qdata_t, scale_t, shape[-2], **kwargs).shape == shape
        assert_same_bytes(moxie.requantize(qdata, scale, **kwargs), (qdata_t, scale_t))
        moxie.quantize_per_row(x, **kwargs)
        moxie.quantize_per_col(x, **kwargs)
    swizzled = moxie.swizzle_scale(moxie.quantize_rowwise(x)[1])
    scale = moxie.quantize_rowwise(x)[1]
    assert_same_bytes(moxie.unswizzle_scale(swizzled, *scale.shape[-2:]).flatten(), scale.flatten())
    if len(shape) == 2:
        offs = torch.zeros(2, dtype=torch.int32, device=device)
        padded, starts, ends = moxie.pad_groups(x, offs)
        assert (padded == 0).all() and starts.tolist() == ends.tolist() == [0, 0]
        assert moxie.unpad_groups(padded, offs, starts, shape[0]).shape == shape


def test_1024_groups_of_all_sizes(device):
    sizes = [(g * 7) % 5 * (g % 3) for g in range(1024)]
    rows = sum(sizes) + 11
    x, offs = random_values(rows, 40, device=device), sizes_to_offs(sizes, device)
    qdata, scale, qdata_t, scale_t = moxie.quantize_both(x, offs=offs)
    begin = at = 0
    for size in sizes:
        group = x[begin : begin + size]
        q, s, q_t, s_t = moxie.quantize_both(group)
        assert_same_bytes((qdata[begin : begin + size], scale[begin : begin + size]), (q, s))
        width = -(-size // 32) * 32
        assert_same_bytes(qdata_t[:, at : at + width].contiguous(), q_t[:, :width].contiguous())
        assert_same_bytes(scale_t[:, at // 32 : (at + width) // 32].contiguous(), s_t[:, : width // 32].contiguous())
        begin, at = begin + size, at + width
    assert (as_bytes(qdata_t[:, at:]) == 0).all() and (as_bytes(qdata[begin:]) == 0).all()
    expected = torch.cat([x[:begin], torch.zeros_like(x[begin:])])
    padded, starts, _ = moxie.pad_groups(x, offs, 8)
    assert_same_bytes(moxie.unpad_groups(padded, offs, starts, rows), expected)


def test_results_do_not_depend_on_the_number_of_threads():
    x, offs = random_values(3000, 700), sizes_to_offs([1000, 0, 1, 1999])
    ops = (
        lambda: moxie.quantize_both(x, offs=offs),
        lambda: moxie.pad_groups(x, offs),
        lambda: moxie.quantize_both(x, offs=offs, rowwise_block="1x128", colwise_block="128x32"),
        lambda: moxie.requantize(*moxie.quantize_rowwise(x), offs=offs),
        lambda: moxie.quantize_per_col(x, offs=offs),
    )
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append([op() for op in ops])
        finally:
            torch.set_num_threads(before)
    for result in results[1:]:
        for actual, expected in zip(result, results[0]):
            assert_same_bytes(actual, expected)


# ---- values that must not affect results --------------------------------------------------------------------------------------


GARBAGE = (math.nan, math.inf, 3e38)


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_rows_past_the_last_group_never_matter(garbage, device):
    x, offs = random_values(200, 96, device=device), sizes_to_offs([40, 0, 101], device)
    dirty = x.clone()
    dirty[141:] = garbage
    calls = [
        lambda x: moxie.quantize_both(x, offs=offs),
        lambda x: moxie.quantize_both(x, offs=offs, rowwise_block="1x128", colwise_block="128x32"),
        lambda x: moxie.quantize_both(x, offs=offs, scale_layout="swizzled"),
        lambda x: moxie.quantize_per_row(x, offs=offs),
        lambda x: moxie.quantize_per_col(x, offs=offs),
        lambda x: moxie.pad_groups(x, offs),
    ]
    for op in calls:
        assert_same_bytes(op(dirty), op(x))
    # Bytes past the groups of quantized operands must not affect what these decode to.
    qdata, scale, qdata_t, scale_t = moxie.quantize_both(x, offs=offs)
    clean = (
        moxie.dequantize_rowwise(qdata, scale, offs=offs),
        moxie.dequantize_colwise(qdata_t, scale_t, 200, offs=offs),
        *moxie.requantize(qdata, scale, offs=offs),
    )
    qdata.view(torch.uint8)[141:] = 0x7F
    scale.view(torch.uint8)[141:] = 0xFF
    qdata_t.view(torch.uint8)[:, 40:64] = 0x7F  # the padding after the first group's 40 rows
    qdata_t.view(torch.uint8)[:, 64 + 128 :] = 0x7F  # after the last
    dirty = (
        moxie.dequantize_rowwise(qdata, scale, offs=offs),
        moxie.dequantize_colwise(qdata_t, scale_t, 200, offs=offs),
        *moxie.requantize(qdata, scale, offs=offs),
    )
    assert_same_bytes(dirty, clean)
    assert not clean[0][141:].any() and not clean[1][141:].any()


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_a_group_never_reaches_another(garbage, device):
    x, offs = random_values(100, 96, device=device), sizes_to_offs([37, 63], device)
    dirty = x.clone()
    dirty[:37] = garbage
    for block in ("32x1", "32x32", "128x1", "128x32", "128x128"):
        rows = int(block.split("x")[0])
        first = -(-37 // rows) * rows
        clean_q, clean_s = moxie.quantize_colwise(x, offs=offs, block=block)
        dirty_q, dirty_s = moxie.quantize_colwise(dirty, offs=offs, block=block)
        assert_same_bytes(dirty_q[:, first:].contiguous(), clean_q[:, first:].contiguous(), block)
        assert_same_bytes(dirty_s[:, first // rows :].contiguous(), clean_s[:, first // rows :].contiguous(), block)


def test_flushing_denormals_changes_nothing():
    x = random_values(200, 96, dtype=torch.float32)
    x[:100] *= 2.0**-130
    # Subnormal in f32 and in bf16, but not 0 once scaled; hardware that flushes subnormals would lose them.
    x[40:52] = torch.arange(96) % 32 * 2.0**-131
    offs = sizes_to_offs([50, 1, 149])
    bf16 = x.bfloat16()
    qdata, scale, qdata_t, scale_t = moxie.quantize_both(x, offs=offs)
    ops = [
        lambda: moxie.quantize_both(x, offs=offs),
        lambda: moxie.quantize_both(bf16, offs=offs, rule="floor"),
        lambda: (moxie.dequantize_rowwise(qdata, scale, dtype=torch.float32),),
        lambda: (moxie.dequantize_colwise(qdata_t, scale_t, 200, offs=offs),),
        lambda: moxie.requantize(qdata, scale, offs=offs),
        lambda: moxie.quantize_per_row(x),
        lambda: moxie.quantize_per_col(x, offs=offs),
    ]
    expected = [op() for op in ops]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for i, op in enumerate(ops):
                assert_same_bytes(op(), expected[i], f"op {i}, {threads} threads")
        assert torch.tensor([2.0**-140]) * 1.0 == 0, "the caller's mode is restored"
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


# ---- gradients --------------------------------------------------------------------------------------------------------------


NOT_DIFFERENTIABLE = [
    case
    for case in CASES
    if case.name not in ("pad_groups", "unpad_groups", "padded_offs", "route") and not case.is_differentiable
]


@pytest.mark.parametrize("case", NOT_DIFFERENTIABLE, ids=str)
def test_results_of_an_op_that_is_not_differentiable_do_not_require_grad(case: Case, device):
    args, kwargs = case.make(device, 70)
    args[0].requires_grad_()
    results = as_tuple(case.op(*args, **kwargs))
    assert not any(t.requires_grad for t in results)
    assert_same_bytes(results, as_tuple(call(case, device)))


def test_backward_through_a_quantizer_says_that_there_is_no_gradient(device):
    x = random_values(70, 96, device=device).requires_grad_()
    y = moxie.dequantize_rowwise(*moxie.quantize_rowwise(x))
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()
    (y + x).sum().backward()  # autograd takes y as a constant, so only x gets a gradient
    assert torch.equal(x.grad, torch.ones_like(x))


def test_gradients_of_pad_groups_and_unpad_groups(device):
    offs = sizes_to_offs([3, 0, 5, 1], device)
    x = torch.randn(12, 4, dtype=torch.float64, device=device, requires_grad=True)  # the last 3 rows are in no group
    padded, starts, _ = moxie.pad_groups(x, offs, 4)
    rows = torch.randn(padded.shape, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: moxie.pad_groups(x, offs, 4)[0], x)
    assert torch.autograd.gradcheck(lambda rows: moxie.unpad_groups(rows, offs, starts, 12), rows)
    # unpad_groups takes any starts, also ones that pad_groups never makes: here the groups lie in reverse order.
    backwards = torch.tensor([20, 20, 8, 0], dtype=torch.int32, device=device)
    assert torch.autograd.gradcheck(lambda rows: moxie.unpad_groups(rows, offs, backwards, 12), rows)


def test_fp8_is_never_differentiable(device):
    qdata, offs = moxie.quantize_rowwise(random_values(70, 96, device=device))[0], sizes_to_offs([70], device)
    padded, starts, ends = moxie.pad_groups(qdata.requires_grad_(), offs)
    assert not any(t.requires_grad for t in (padded, starts, ends))


def test_ops_run_in_inference_mode(device):
    x = random_values(70, 96, device=device)
    expected = moxie.quantize_both(x)
    with torch.inference_mode():
        results = moxie.quantize_both(x)
        assert_same_bytes(results, expected)
        out = tuple(torch.empty_like(t) for t in results)  # tensors made in inference mode have no version counter
        assert_same_bytes(moxie.quantize_both(x, out=out), expected)
