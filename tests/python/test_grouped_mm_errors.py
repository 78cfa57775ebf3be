"""Bad calls of the grouped products: the exception names the op as it was called, the rule and the value."""

import pytest
import torch

import moxie
from grouped_reference import gaussian
from support import assert_same_bytes, e8m0, sizes_to_offs

P = gaussian([30, 0, 40], 64, 96)
X, W, DY, OFFS = P.x, P.w, P.dy, P.offs
RECIPE = {"recipe": "mxfp8_rceil"}
W8 = list(moxie.quantize_weights(W, **RECIPE))
X8 = moxie.quantize_both(X, offs=OFFS)
DY8 = moxie.quantize_both(DY, offs=OFFS)
MAIN = torch.zeros(W.shape)


def offs(*ends: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


# (args, kwargs) -> (exception, parts of its message after "grouped_mm: ")
BAD_CALLS = {
    "x-dims": ((X[0], W, OFFS), {}, ValueError, "x must be [rows, k], got 1 dims"),
    "w-dims": ((X, W[0], OFFS), {}, ValueError, "w must be [groups, n, k], got 2 dims"),
    "contraction": ((X, W[:, :, :64], OFFS), {}, ValueError, "x has 96 columns, and w contracts 64"),
    "w-transposed": ((X, W.mT, OFFS), {}, ValueError, "x has 96 columns, and w contracts 64"),
    "groups": ((X, W[:2], OFFS), {}, ValueError, "w has 2 matrices for 3 groups"),
    "groups-without-offs": ((X, W), {}, ValueError, "w has 3 matrices for 1 groups"),
    "x-half": ((X.half(), W, OFFS), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.float16"),
    "x-int": ((X.int(), W, OFFS), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.int32"),
    "x-fp8": ((X8[0], W, OFFS), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.float8_e4m3fn"),
    "x-double": ((X.double(), W, OFFS), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.float64"),
    "w-half": ((X, W.half(), OFFS), {}, TypeError, "w must be torch.bfloat16 or torch.float32, got torch.float16"),
    "w-fp8": ((X, W8[0], OFFS), {}, TypeError, "w must be torch.bfloat16 or torch.float32, got torch.float8_e4m3fn"),
    "bf16-x-half": ((X.half(), W, OFFS), {"recipe": "bf16"}, TypeError, "x must be torch.bfloat16 or torch.float32"),
    "bf16-w-half": ((X, W.half(), OFFS), {"recipe": "bf16"}, TypeError, "w must be torch.bfloat16 or torch.float32"),
    "row-x-half": ((X.half(), W, OFFS), {"recipe": "fp8_rowwise"}, TypeError, "x must be torch.bfloat16 or torch.float32"),
    "dtype": ((X, W, OFFS), {"dtype": torch.float16}, TypeError, "dtype must be torch.bfloat16 or torch.float32", "float16"),
    "w-device": ((X, W.to("meta"), OFFS), {}, ValueError, "on one device, got w on meta beside cpu"),
    "offs-device": ((X, W, OFFS.to("meta")), {}, ValueError, "on one device, got offs on meta beside cpu"),
    "bias-device": ((X, W, OFFS), {"bias": torch.zeros(64, device="meta")}, ValueError, "got bias on meta beside cpu"),
    "bias-length": ((X, W, OFFS), {"bias": torch.zeros(65)}, ValueError, "bias must be [64], got [65]"),
    "bias-groups": ((X, W, OFFS), {"bias": torch.zeros(2, 64)}, ValueError, "bias must be [3, 64], got [2, 64]"),
    "bias-rows": ((X, W, OFFS), {"bias": torch.zeros(70, 64)}, ValueError, "bias must be [3, 64], got [70, 64]"),
    "bias-dims": ((X, W, OFFS), {"bias": torch.zeros(1, 1, 64)}, ValueError, "bias must be [64], got [1, 1, 64]"),
    "bias-dtype": ((X, W, OFFS), {"bias": torch.zeros(64, dtype=torch.int32)}, TypeError, "bias must be", "got torch.int32"),
    "offs-dtype": ((X, W, OFFS.long()), {}, TypeError, "offs must be torch.int32, got torch.int64"),
    "offs-dims": ((X, W, OFFS[None]), {}, ValueError, "offs must be [groups], got 2 dims"),
    "offs-none": ((X, W[:0], OFFS[:0]), {}, ValueError, "offs must hold 1 to 1024 groups, got 0"),
    "offs-many": (
        (X, W.new_zeros(1025, 4, 96), torch.full((1025,), 70, dtype=torch.int32)),
        {},
        ValueError,
        "offs must hold 1 to 1024 groups, got 1025",
    ),
    "offs-decrease": ((X, W, offs(10, 5, 70)), {}, ValueError, "offs must not decrease", "got 5 after 10 at group 1"),
    "offs-negative": ((X, W, offs(-1, 5, 70)), {}, ValueError, "offs must not decrease and start at 0 or above", "got -1"),
    "offs-past": ((X, W, offs(10, 50, 71)), {}, ValueError, "offs must not pass the end of the 70 rows, got 71"),
    "bf16-offs-past": ((X, W, offs(10, 50, 71)), {"recipe": "bf16"}, ValueError, "offs must not pass the end of the 70 rows"),
    "row-offs-past": ((X, W, offs(10, 50, 71)), {"recipe": "fp8_rowwise"}, ValueError, "offs must not pass the end of the 70"),
    "quantized-count": (
        (X, W, OFFS),
        {"quantized_w": W8[:2]},
        ValueError,
        "quantized_w must be the four tensors of quantize_weights",
        "got 2",
    ),
    "quantized-none": ((X, W, OFFS), {"quantized_w": []}, ValueError, "quantized_w must be the four tensors", "got 0"),
    "quantized-recipe": (
        (X, W, OFFS),
        {"quantized_w": W8, "recipe": "mxfp8_rceil_128"},
        ValueError,
        "w_scale must be [3, 1, 1], got [3, 64, 3]",
    ),
    "quantized-row": (
        (X, W, OFFS),
        {"quantized_w": W8, "recipe": "fp8_rowwise"},
        TypeError,
        "w_scale must be torch.float32 in this recipe",
    ),
    "quantized-of-other-w": (
        (X, W, OFFS),
        {**RECIPE, "quantized_w": list(moxie.quantize_weights(W[:, :32], **RECIPE))},
        ValueError,
        "got [3, 32, 96]",
    ),
    "quantized-bf16": ((X, W, OFFS), {"quantized_w": W8, "recipe": "bf16"}, ValueError, "this recipe quantizes nothing"),
    "quantized-dtype": (
        (X, W, OFFS),
        {**RECIPE, "quantized_w": [W, *W8[1:]]},
        TypeError,
        "must be torch.float8_e4m3fn, got torch.bfloat16",
    ),
    "main_grad-dtype": (
        (X, W, OFFS),
        {"main_grad": MAIN.bfloat16()},
        TypeError,
        "main_grad must be torch.float32, got torch.bfloat16",
    ),
    "main_grad-shape": ((X, W, OFFS), {"main_grad": MAIN[:2]}, ValueError, "main_grad must be [3, 64, 96], got [2, 64, 96]"),
    "main_grad-device": ((X, W, OFFS), {"main_grad": MAIN.to("meta")}, ValueError, "got main_grad on meta beside cpu"),
    "main_grad-requires_grad": (
        (X, W, OFFS),
        {"main_grad": MAIN.clone().requires_grad_()},
        ValueError,
        "main_grad must not require grad",
    ),
    "main_grad-strided": (
        (X, W, OFFS),
        {"main_grad": torch.zeros(3, 64, 192)[..., ::2]},
        ValueError,
        "main_grad",
        "must be contiguous",
    ),
    "main_grad-transposed": (
        (X, W, OFFS),
        {"main_grad": torch.zeros(3, 96, 64)},
        ValueError,
        "main_grad must lie as the weight does, [3, 64, 96]",
        "got its transpose, [3, 96, 64]",
        "torch.zeros_like(w, dtype=torch.float32) lies so",
    ),
    "main_grad-of-transposed-strides": (
        (X, W, OFFS),
        {"main_grad": torch.zeros(3, 96, 64).mT},
        ValueError,
        "main_grad must lie as the weight does",
        "a weight that is stored [G, K, N] is given as the view w.mT, with main_grad.mT",
    ),
    "recipe": ((X, W, OFFS), {"recipe": "mxfp9"}, ValueError, "there is no recipe 'mxfp9'; there are bf16,"),
}


@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_says_the_op_the_rule_and_the_value(name, grad):
    (x, w, *rest), kwargs, exception, *parts = BAD_CALLS[name]
    if grad and x.is_floating_point() and w.is_floating_point():
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    with pytest.raises(exception) as caught:
        moxie.grouped_mm(x, w, *rest, **kwargs)
    message = str(caught.value)
    assert message.startswith("grouped_mm: "), message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("name", ("quantized-of-other-w", "quantized-recipe", "quantized-row"))
def test_a_bad_cache_is_refused_before_backward(name):
    """Bad colwise forms, which only backward reads, are refused in forward already."""
    good = list(moxie.quantize_weights(W, recipe=BAD_CALLS[name][1]["recipe"]))
    mixed = good[:2] + BAD_CALLS[name][1]["quantized_w"][2:]
    with pytest.raises((TypeError, ValueError), match="grouped_mm: "):
        moxie.grouped_mm(X.detach().requires_grad_(), W, OFFS, recipe=BAD_CALLS[name][1]["recipe"], quantized_w=mixed)


# ---- the passes ------------------------------------------------------------------------------------------------------------


ops = torch.ops.moxie
BAD_PASSES = {
    "grouped_fwd-dims": (moxie.grouped_fwd, (X8[0][0], X8[1], *W8[:2], OFFS), ValueError, "x must have 2 dims, got 1"),
    "grouped_fwd-scale": (
        moxie.grouped_fwd,
        (X8[0], X8[1][:5], *W8[:2], OFFS),
        ValueError,
        "x_scale must be [70, 3], got [5, 3]",
    ),
    "grouped_fwd-scale-dtype": (
        moxie.grouped_fwd,
        (X8[0], torch.zeros(70, 3), *W8[:2], OFFS),
        TypeError,
        "x_scale must be torch.float8_e8m0fnu, got torch.float32",
    ),
    "grouped_fwd-no-scale": (
        moxie.grouped_fwd,
        (X8[0], None, *W8[:2], OFFS),
        TypeError,
        "x must be torch.bfloat16 or torch.float32, got torch.float8_e4m3fn",
    ),
    "grouped_fwd-columns": (
        moxie.grouped_fwd,
        (*DY8[:2], *W8[:2], OFFS),
        ValueError,
        "x must have the 96 columns that w contracts, got 64",
    ),
    "grouped_fwd-groups": (moxie.grouped_fwd, (*X8[:2], *W8[:2], OFFS[:2]), ValueError, "w has 3 matrices for 2 groups"),
    "grouped_dgrad-columns": (
        ops.grouped_dgrad,
        (*X8[:2], *W8[2:], OFFS),
        ValueError,
        "dy must have the 64 columns that w contracts, got 96",
    ),
    "grouped_dgrad-scale": (
        ops.grouped_dgrad,
        (*DY8[:2], W8[2], W8[1], OFFS),
        ValueError,
        "w_scale_t must be [3, 96, 2], got [3, 64, 3]",
    ),
    "grouped_wgrad-rows": (ops.grouped_wgrad, (*DY8[2:], *X8[2:], 700, OFFS), ValueError, "dy_t must be [64,", "got [64, 256]"),
    "grouped_wgrad-dims": (ops.grouped_wgrad, (*DY8[2:], *W8[2:], 70, OFFS), ValueError, "x_t must have 2 dims, got 3"),
    "grouped_wgrad-mixed": (ops.grouped_wgrad, (*DY8[2:], X[:60], None, 70, OFFS), ValueError, "dy and x must have as many rows"),
}


@pytest.mark.parametrize("name", BAD_PASSES)
def test_a_bad_pass_says_the_op_the_rule_and_the_value(name):
    op, args, exception, *parts = BAD_PASSES[name]
    with pytest.raises(exception) as caught:
        op(*args, **RECIPE)
    message = str(caught.value)
    assert message.startswith(name.split("-")[0] + ": "), message
    for part in parts:
        assert part in message, message


def test_a_bad_gradient_to_add_to_is_refused_and_left_alone():
    call = lambda dw, ends=OFFS: ops.grouped_wgrad_add_(dw, *DY8[2:], *X8[2:], 70, ends, **RECIPE)
    with pytest.raises(TypeError, match="grouped_wgrad_add_: dw must be torch.float32 to be added to, got torch.bfloat16"):
        call(MAIN.bfloat16())
    with pytest.raises(ValueError, match=r"grouped_wgrad_add_: dw must be \[3, 64, 96\], got \[2, 64, 96\]"):
        call(MAIN[:2].clone())
    with pytest.raises(ValueError, match="grouped_wgrad_add_: dw is written in place and must be contiguous"):
        call(torch.zeros(3, 96, 64).mT)
    with pytest.raises(ValueError, match="grouped_wgrad_add_: dw is written in place and must not require grad"):
        call(MAIN.clone().requires_grad_())
    dw = torch.full_like(MAIN, 3.0)
    with pytest.raises(ValueError, match="offs must not"):
        call(dw, offs(30, 20, 70))
    assert (dw == 3).all()


def test_scales_may_come_as_bytes(device):
    """Weight caches hold scales as uint8, because inductor does not let an op write e8m0."""
    to = lambda form: [t.to(device) for t in form]
    x, w, ends = to(X8[:2]), to(W8[:2]), OFFS.to(device)
    expected = moxie.grouped_fwd(*x, *w, ends, **RECIPE)
    as_codes = [w[0], w[1].view(torch.uint8)]
    assert_same_bytes(moxie.grouped_fwd(x[0], x[1].view(torch.uint8), *as_codes, ends, **RECIPE), expected)
    assert as_codes[1].dtype == torch.uint8 and e8m0(as_codes[1].cpu()).shape == (3, 64, 3)


def test_weights_that_cannot_be_cached_are_refused():
    for w, exception, part in (
        (W[0], ValueError, "w must be [groups, n, k], got 2 dims"),
        (W.half(), TypeError, "w must be torch.bfloat16 or torch.float32, got torch.float16"),
    ):
        with pytest.raises(exception) as caught:
            moxie.quantize_weights(w)
        assert str(caught.value).startswith("quantize_weights: ") and part in str(caught.value)
    with pytest.raises(ValueError, match="quantize_weights: .*quantizes nothing"):
        moxie.quantize_weights(W, recipe="bf16")
    with pytest.raises(ValueError, match="quantize_weights: "):
        ops.quantize_weights.out(W, recipe="mxfp8_rceil_128", qdata=W8[0], scale=W8[1], qdata_t=W8[2], scale_t=W8[3])


def test_sum_groups_adds_up_the_rows_of_each_group(device):
    x, ends = X.to(device), sizes_to_offs([30, 0, 37], device)
    expected = torch.stack([x[:30].float().sum(0), torch.zeros(96, device=device), x[30:67].float().sum(0)])
    torch.testing.assert_close(ops.sum_groups(x, ends), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ops.sum_groups(x)[0], x.float().sum(0), rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match=r"sum_groups: x must be \[rows, cols\], got 3 dims"):
        ops.sum_groups(W)
