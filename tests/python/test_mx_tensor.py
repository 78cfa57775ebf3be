"""MXTensor: its contents, the torch ops that it supports, and its product."""

import copy
import io
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import moxie
from grouped_reference import gaussian, run, sqnr
from moxie.mx_tensor import MXTensor
from support import assert_same_bytes, random_values

RAGGED = [37, 0, 64, 5, 120]
RECIPES = [name for name in moxie.recipe_names() if name.startswith("mxfp8")]
GIVEN = ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp", "mxfp8_rceil_128")


def same(a: MXTensor, b: MXTensor) -> None:
    assert type(a) is type(b) is MXTensor and (a.dtype, a.shape, a.block) == (b.dtype, b.shape, b.block)
    assert_same_bytes((a.qdata, a.scale), (b.qdata, b.scale))


# ---- values -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("block", ("1x32", "32x32", "1x128", "128x32", "128x128"))
@pytest.mark.parametrize("shape", ((40, 96), (2, 70, 100)))
def test_it_holds_what_the_quantizer_gives(shape, block, dtype, device):
    x = random_values(*shape, dtype=dtype, device=device)
    mx = MXTensor.to_mx(x, block=block, rule="floor")
    qdata, scale = moxie.quantize_rowwise(x, block=block, rule="floor")
    assert_same_bytes((mx.qdata, mx.scale), (qdata, scale))
    assert mx.dtype == mx.orig_dtype == dtype and mx.shape == x.shape and mx.device == x.device
    assert torch.equal(mx.dequantize(), moxie.dequantize_rowwise(qdata, scale, block=block, dtype=dtype))
    assert mx.dequantize(torch.float32).dtype == torch.float32
    same(MXTensor.from_qdata_and_scales(qdata, scale, dtype, block=block), mx)


def test_any_leading_dims(device):
    x = torch.randn(2, 3, 4, 64, device=device)
    mx = MXTensor.to_mx(x)
    assert mx.scale.shape == (2, 3, 4, 2)
    assert torch.equal(mx.dequantize(), MXTensor.to_mx(x.view(24, 64)).dequantize().view(2, 3, 4, 64))


def test_block_size_is_another_way_to_say_the_block():
    qdata, scale = moxie.quantize_rowwise(torch.randn(4, 256), block="1x128")
    same(
        MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16, block_size=128),
        MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16, block="1x128"),
    )


def test_gradients_pass_in_the_original_dtype(device):
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(8, 64, dtype=dtype, device=device, requires_grad=True)
        mx = MXTensor.to_mx(x)
        assert mx.requires_grad and mx.grad_fn is not None
        dy = torch.randn(8, 64, dtype=dtype, device=device)
        mx.dequantize().backward(dy)
        assert x.grad.dtype == dtype and torch.equal(x.grad, dy)


# ---- what torch does with it -----------------------------------------------------------------------------------------------


def test_moving_ops(device):
    x = torch.randn(64, 128, device=device)
    mx = MXTensor.to_mx(x)
    same(mx.detach(), mx)
    assert mx.detach().qdata.data_ptr() == mx.qdata.data_ptr()
    same(mx.clone(), mx)
    assert mx.clone().qdata.data_ptr() != mx.qdata.data_ptr()
    same(mx.to(device), mx)
    same(mx.to("cpu"), MXTensor.to_mx(x.cpu()))
    same(copy.deepcopy(mx), mx)
    same(mx.contiguous(), mx)
    same(mx.view(2, 32, 128), MXTensor.to_mx(x.view(2, 32, 128)))
    same(mx.view(2, 32, 128).reshape(-1, 128), mx)
    same(mx[7:21], MXTensor.to_mx(x[7:21]))
    same(mx[::2], MXTensor.to_mx(x[::2]))
    same(mx[:, 32:96], MXTensor.to_mx(x[:, 32:96]))
    same(mx.narrow(0, 3, 9), MXTensor.to_mx(x[3:12]))
    same(mx.view(2, 32, 128)[1], MXTensor.to_mx(x[32:]))
    same(mx[None], MXTensor.to_mx(x[None]))
    same(mx.view(2, 32, 128).unsqueeze(-3), MXTensor.to_mx(x.view(2, 1, 32, 128)))
    for part, plain in zip(mx.split([10, 54]), x.split([10, 54])):
        same(part, MXTensor.to_mx(plain))
    for part, plain in zip(mx.chunk(3), x.chunk(3)):
        same(part, MXTensor.to_mx(plain))
    square = MXTensor.to_mx(x, block="32x32")
    same(square[32:], MXTensor.to_mx(x[32:], block="32x32"))
    assert "block=1x32" in repr(mx)


def test_gradients_flow_through_views(device):
    x = torch.randn(64, 128, device=device, requires_grad=True)
    MXTensor.to_mx(x)[3:10].view(1, 7, 128)[0][None].dequantize().sum().backward()
    assert x.grad[3:10].eq(1).all() and x.grad.sum() == 7 * 128


def test_other_processes_may_share_it():
    mx = MXTensor.to_mx(torch.randn(4, 64))
    assert not mx.is_shared() and mx.share_memory_() is mx and mx.is_shared()
    same(pickle.loads(bytes(ForkingPickler.dumps(mx))), mx)


def test_it_is_saved_and_loaded_with_weights_only(device):
    mx = MXTensor.to_mx(torch.randn(40, 96, device=device), block="1x128").requires_grad_()
    file = io.BytesIO()
    torch.save({"x": mx}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    same(loaded, mx)
    assert loaded.requires_grad
    same(pickle.loads(pickle.dumps(mx)), mx)


def test_a_new_process_loads_it_with_weights_only(tmp_path):
    """A new process can load an MXTensor once it has imported moxie; it need not import MXTensor."""
    mx = MXTensor.to_mx(torch.randn(40, 96))
    torch.save(mx, tmp_path / "mx.pt")
    script = (
        "import sys; sys.path[:] = sys.argv[2:]; import torch, moxie; mx = torch.load(sys.argv[1], weights_only=True); "
        "print(type(mx).__name__, mx.dequantize().sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "mx.pt"), *sys.path], capture_output=True, text=True)
    assert done.stdout.split() == ["MXTensor", str(mx.dequantize().sum().item())], done.stderr


def test_a_file_that_does_not_fit_is_refused():
    qdata, scale = moxie.quantize_rowwise(torch.randn(40, 96))
    with pytest.raises(ValueError, match="must be .40, 3., got .20, 3."):
        moxie.mx_load.rebuild(qdata.view(torch.uint8), scale[:20].view(torch.uint8), torch.bfloat16, "1x32", False)


def test_words_of_torchao_say_the_same():
    x = torch.randn(40, 256)
    same(
        MXTensor.to_mx(x, torch.float8_e4m3fn, 128, moxie.ScaleCalculationMode.FLOOR),
        MXTensor.to_mx(x, block="1x128", rule="floor"),
    )


@pytest.mark.parametrize(
    "call, words",
    (
        (lambda mx: mx + 1, "aten.add.Tensor is not defined on quantized values; call dequantize() first"),
        (lambda mx: mx @ mx, "call dequantize() first"),
        (lambda mx: mx.float(), "to(torch.float32) would not be quantized; dequantize(torch.float32)"),
        (lambda mx: mx.view(-1), "view must keep the columns of (64, 128)"),
        (lambda mx: mx.view(128, 64), "view must keep the columns"),
        (lambda mx: mx[:, 8:], "a slice of dim 1 must start and end at multiples of 32, the block there, got 8:128:1"),
        (lambda mx: mx[:, ::2], "multiples of 32"),
    ),
)
def test_what_is_not_defined_says_so(call, words):
    mx = MXTensor.to_mx(torch.randn(64, 128, dtype=torch.bfloat16))
    with pytest.raises((NotImplementedError, ValueError)) as error:
        call(mx)
    assert words in str(error.value)


# ---- its product ------------------------------------------------------------------------------------------------------------


def run_mx(problem, recipe, *, leaf=False, compiled=None, block=None, **kwargs):
    fields = moxie.Recipe.from_name(str(recipe))
    to_mx = lambda x: MXTensor.to_mx(x, block=block or fields.activations, rule=fields.rule)
    x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
    bias = None if problem.bias is None else problem.bias.detach().requires_grad_()
    offs = problem.offs
    if leaf:
        x = to_mx(x.detach()).requires_grad_()

    def product(x, w, bias):
        return moxie.grouped_mm(x if leaf else to_mx(x), w, offs, recipe=recipe, bias=bias, **kwargs)

    y = (torch.compile(product, fullgraph=True, backend=compiled) if compiled else product)(x, w, bias)
    y.backward(problem.dy.to(y.dtype))
    assert type(y) is type(x.grad) is type(w.grad) is torch.Tensor
    return y.detach(), x.grad, w.grad, None if bias is None else bias.grad


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("recipe", RECIPES)
def test_its_product_is_that_of_the_same_values_quantized_in_the_call(recipe, dtype, device):
    problem = gaussian(RAGGED, 72, 160, tail=9, dtype=dtype, bias="gn", device=device)
    expected = run(problem, recipe)
    for leaf in (False, True):
        y, dx, dw, dbias = run_mx(problem, recipe, leaf=leaf)
        assert_same_bytes((y, dx, dbias), (expected.y, expected.dx, expected.dbias))
        # Only dw has more noise: x is rowwise FP8 already, and wgrad quantizes it a second time.
        assert dw.dtype == dtype and sqnr(dw, expected.dw) > 30
        assert not dw[1].any() and not dx[-9:].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_wgrad_is_that_of_its_values(recipe, device):
    """dw agrees to 45 dB with that of grouped_mm with the dequantized MXTensor as x."""
    fields = moxie.Recipe.from_name(recipe)
    problem = gaussian(RAGGED, 72, 160, device=device)
    mx = MXTensor.to_mx(problem.x, block=fields.activations, rule=fields.rule)
    decoded = gaussian(RAGGED, 72, 160, device=device)
    decoded.x = mx.dequantize(torch.float32)
    expected = run(decoded, recipe, dtype=torch.bfloat16)
    assert sqnr(run_mx(problem, recipe)[2], expected.dw) > 45


@pytest.mark.parametrize("leaf", (False, True))
@pytest.mark.parametrize("recipe", GIVEN)
def test_its_product_compiles_without_breaks(recipe, leaf, device):
    torch._dynamo.reset()
    problem = gaussian(RAGGED, 72, 160, tail=9, bias="n", device=device)
    expected = run_mx(problem, recipe, leaf=leaf)
    assert_same_bytes(run_mx(problem, recipe, leaf=leaf, compiled="aot_eager"), expected)


def test_its_product_compiles_with_inductor(device):
    torch._dynamo.reset()
    problem = gaussian(RAGGED, 72, 160, bias="n", device=device)
    assert_same_bytes(run_mx(problem, "mxfp8_rceil", compiled="inductor"), run_mx(problem, "mxfp8_rceil"))


def test_its_product_compiles_for_any_number_of_rows(device):
    torch._dynamo.reset()
    product = torch.compile(
        lambda x, w, offs: moxie.grouped_mm(MXTensor.to_mx(x), w, offs, recipe="mxfp8_rceil"),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for sizes in (RAGGED, [3, 3, 0, 9, 1], [200, 0, 0, 0, 99]):
        problem = gaussian(sizes, 72, 160, device=device)
        x = problem.x.detach().requires_grad_()
        y = product(x, problem.w, problem.offs)
        y.backward(problem.dy)
        expected = run(problem, "mxfp8_rceil")
        assert torch.equal(y, expected.y) and torch.equal(x.grad, expected.dx)


def test_its_product_obeys_torch(device):
    problem = gaussian(RAGGED, 64, 128, bias="gn", device=device)
    qdata, scale = moxie.quantize_rowwise(problem.x)
    for requires_grad in (False, True):
        values = [tensor.detach().requires_grad_(requires_grad) for tensor in (problem.x, problem.w, problem.bias)]
        x, w, bias = values
        torch.library.opcheck(
            torch.ops.moxie.grouped_mm.mx,
            (x, qdata, scale, w, problem.offs),
            dict(recipe="mxfp8_rceil", bias=bias),
            test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


def test_it_is_multiplied_where_there_is_no_autograd(device):
    problem = gaussian(RAGGED, 64, 128, device=device)
    expected = run(problem, "mxfp8_rceil").y
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = moxie.grouped_mm(MXTensor.to_mx(problem.x), problem.w, problem.offs, recipe="mxfp8_rceil")
        assert torch.equal(y, expected) and not y.requires_grad


def test_autocast_gives_its_dtype(device):
    problem = gaussian(RAGGED, 64, 128, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for recipe, dtype in (("mxfp8_rceil", torch.bfloat16), ("mxfp8_rceil:out=float32", torch.float32)):
            given, plain = (
                moxie.grouped_mm(x, problem.w, problem.offs, recipe=recipe) for x in (MXTensor.to_mx(problem.x), problem.x)
            )
            assert given.dtype == plain.dtype == dtype


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_its_product_may_be_checkpointed(use_reentrant, device):
    problem = gaussian(RAGGED, 64, 128, device=device)
    x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(
        lambda x, w: moxie.grouped_mm(MXTensor.to_mx(x), w, problem.offs, recipe="mxfp8_rceil"), x, w, use_reentrant=use_reentrant
    )
    y.backward(problem.dy)
    expected = run_mx(problem, "mxfp8_rceil")
    assert_same_bytes((y.detach(), x.grad, w.grad), expected[:3])


def test_it_is_built_from_parts_inside_a_graph(device):
    torch._dynamo.reset()
    problem = gaussian(RAGGED, 64, 128, device=device)
    qdata, scale = moxie.quantize_rowwise(problem.x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(qdata, scale, w):
        mx = MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16)
        return moxie.grouped_mm(mx, w, problem.offs, recipe="mxfp8_rceil")

    assert torch.equal(product(qdata, scale, problem.w), run(problem, "mxfp8_rceil").y)


def test_blocks_of_128_serve_a_recipe_with_blocks_of_32(device):
    problem = gaussian(RAGGED, 72, 160, device=device)
    exact = gaussian(RAGGED, 72, 160, device=device)
    exact.x = MXTensor.to_mx(problem.x, block="1x128").dequantize()
    y, _, dw, _ = run_mx(problem, "mxfp8_rceil", block="1x128")
    assert sqnr(y, run(exact, "bf16").y) > 28 and dw.isfinite().all()


def test_weight_caches_and_main_gradients_work_with_it(device):
    problem = gaussian(RAGGED, 72, 160, device=device)
    expected = run_mx(problem, "mxfp8_rceil")
    cache = moxie.WeightCache(problem.w, recipe="mxfp8_rceil")
    assert_same_bytes(run_mx(problem, "mxfp8_rceil", quantized_w=cache)[:3], expected[:3])
    main_grad = torch.ones(problem.w.shape, device=device)
    mx, w = MXTensor.to_mx(problem.x), problem.w.detach().requires_grad_()
    moxie.grouped_mm(mx, w, problem.offs, recipe="mxfp8_rceil", main_grad=main_grad).backward(problem.dy)
    assert w.grad is None and sqnr(main_grad - 1, expected[2]) > 40


def test_only_the_gradients_that_are_needed_are_computed(device):
    problem = gaussian(RAGGED, 72, 160, device=device)
    mx, w = MXTensor.to_mx(problem.x), problem.w.detach().requires_grad_()
    moxie.grouped_mm(mx, w, problem.offs, recipe="mxfp8_rceil").backward(problem.dy)
    assert mx.grad is None and w.grad is not None
    mx = mx.requires_grad_()
    moxie.grouped_mm(mx, w.detach(), problem.offs, recipe="mxfp8_rceil").backward(problem.dy)
    assert mx.grad.dtype == torch.bfloat16 and torch.equal(mx.grad, run(problem, "mxfp8_rceil").dx)


@pytest.mark.parametrize("recipe", ("mxfp8_rceil", "mxfp8_rceil_128"))
def test_it_takes_the_blackwell_path_in_its_layout(recipe, sm100):
    problem = gaussian(RAGGED, 64, 160, tail=9)
    expected = run(problem, recipe)
    y, dx, dw, _ = run_mx(problem, recipe)
    assert sqnr(y, expected.y) > 60 and sqnr(dx, expected.dx) > 60 and sqnr(dw, expected.dw) > 30


def test_it_multiplies_converted_weights_and_linears():
    linear = moxie.MXLinear(64, 96, config="mxfp8_rceil")
    x = torch.randn(2, 5, 64)
    assert torch.equal(linear(MXTensor.to_mx(x)), linear(x))
    holder = torch.nn.Module()
    holder.w = torch.nn.Parameter(torch.randn(3, 32, 64))
    moxie.quantize_(holder, "mxfp8_rceil")
    x, offs = torch.randn(9, 64), torch.tensor([2, 2, 9], dtype=torch.int32)
    assert torch.equal(torch._grouped_mm(MXTensor.to_mx(x), holder.w.mT, offs=offs), torch._grouped_mm(x, holder.w.mT, offs=offs))
