"""torch.compile(fullgraph=True) gives the bytes of eager mode, and compiles once for all sizes."""

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing

import moxie
from support import CASES, Case, as_tuple, assert_same_bytes, out_case, random_values, sizes_to_offs

SIZES = (70, 100, 333, 45)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function, backend: str):
    """Returns the compiled function and a counter of its compilations."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


def mark_dynamic(args, kwargs, others) -> None:
    """Marks each dim that differs in `others`, the same call at another size, as dynamic: torch.compile then fails if it would
    specialize on its size."""
    for name, value in {**dict(enumerate(args)), **kwargs}.items():
        if isinstance(value, torch.Tensor):
            other = others[1][name] if isinstance(name, str) else others[0][name]
            for dim in range(value.dim()):
                if value.shape[dim] != other.shape[dim]:
                    torch._dynamo.mark_dynamic(value, dim)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_compiles_once_for_all_sizes(case: Case, device):
    function, counter = compiled(lambda *args, **kwargs: case.op(*args, **kwargs), "aot_eager")
    for rows in SIZES:
        args, kwargs = case.make(device, rows)
        expected = as_tuple(case.op(*args, **kwargs))
        mark_dynamic(args, kwargs, case.make(device, rows + 129))
        assert_same_bytes(as_tuple(function(*args, **kwargs)), expected, f"{rows} rows")
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ("quantize_both", "requantize", "dequantize_colwise", "pad_groups", "unpad_groups"))
def test_out_overload_compiles_once_for_all_sizes(name, device):
    case = next(case for case in CASES if case.name == name)
    op = getattr(torch.ops.moxie, name).out
    function, counter = compiled(lambda *args, **kwargs: op(*args, **kwargs), "aot_eager")
    for rows in SIZES:
        _, args, kwargs, names = out_case(case, device, rows)
        mark_dynamic(args, kwargs, out_case(case, device, rows + 129)[1:3])
        function(*args, **kwargs)
        expected = as_tuple(case.op(*case.make(device, rows)[0], **case.make(device, rows)[1]))
        assert_same_bytes([kwargs[name] for name in names], expected, f"{rows} rows")
    assert counter.frame_count == 1


def chain(x, offs, qdata_buffer, scale_buffer):
    """A graph with ops of every kind, between elementwise operations for which inductor generates kernels. It also writes into
    two buffers."""
    y = torch.relu(x) * 2 - 1  # in f32, because inductor does not round between bf16 operations and eager mode does
    qdata, scale, qdata_t, scale_t = moxie.quantize_both(y, offs=offs)
    again = moxie.dequantize_colwise(qdata_t, scale_t, y.shape[0], offs=offs, dtype=torch.float32) + y
    swizzled = moxie.swizzle_scale(scale, offs=offs)
    plain = moxie.unswizzle_scale(swizzled, scale.shape[0], scale.shape[1], offs=offs)
    padded, starts, ends = moxie.pad_groups(qdata, offs, 16)
    moxie.quantize_rowwise(y, out=(qdata_buffer, scale_buffer))
    from_buffer = moxie.dequantize_rowwise(qdata_buffer, scale_buffer.view(torch.float8_e8m0fnu), dtype=torch.float32)
    return (
        qdata,
        scale,
        qdata_t,
        scale_t,
        again,
        plain,
        padded,
        starts + 1,
        ends,
        *moxie.requantize(qdata, scale, offs=offs),
        moxie.unpad_groups(padded, offs, starts, y.shape[0]),
        *moxie.quantize_per_row(y),
        from_buffer.cos(),
    )


def chain_inputs(rows: int, device: str):
    buffers = (
        torch.zeros(rows, 96, dtype=torch.float8_e4m3fn, device=device),
        torch.zeros(rows, 3, dtype=torch.uint8, device=device),
    )
    x = random_values(rows, 96, dtype=torch.float32, device=device)
    return x, sizes_to_offs([5, 0, 33, rows - 40], device), *buffers


def test_inductor_gives_the_bytes_of_eager_mode_for_all_sizes(device):
    function, counter = compiled(chain, "inductor")
    for rows in SIZES:
        eager_inputs, inputs = chain_inputs(rows, device), chain_inputs(rows, device)
        expected = chain(*eager_inputs)
        mark_dynamic(inputs, {}, (chain_inputs(rows + 129, device), {}))
        actual = function(*inputs)
        assert_same_bytes(actual[:-1], expected[:-1], f"{rows} rows")
        torch.testing.assert_close(actual[-1], expected[-1])
        assert_same_bytes(inputs[2:], eager_inputs[2:], f"buffers, {rows} rows")
    assert counter.frame_count == 1


def test_gradients_of_pad_and_unpad_compile(device):
    def loss(x, offs):
        padded, starts, _ = moxie.pad_groups(x, offs, 16)
        return (moxie.unpad_groups(padded.tanh(), offs, starts, x.shape[0]) ** 2).sum()

    function, counter = compiled(loss, "aot_eager")
    for rows in SIZES:
        offs = sizes_to_offs([5, 0, 33, rows - 45], device)  # the last 7 rows are in no group
        grads = []
        for run in (loss, function):
            x = random_values(rows, 8, dtype=torch.float32, device=device).requires_grad_()
            run(x, offs).backward()
            grads.append(x.grad)
        assert_same_bytes(grads[1], grads[0])
    assert counter.frame_count == 1


DIFFERENTIABLE = [case for case in CASES if case.is_differentiable or case.name in ("pad_groups", "unpad_groups")]


def with_leaves(args, kwargs, names):
    """Replaces the named arguments by new leaf tensors. Returns args, kwargs, and the leaves by name."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in {**dict(enumerate(args)), **kwargs}.items()
        if name in names
    }
    return (
        [leaves.get(i, value) for i, value in enumerate(args)],
        {name: leaves.get(name, value) for name, value in kwargs.items()},
        leaves,
    )


def step(function, args, kwargs, names):
    """Runs forward and backward. Returns the result and the gradients of the named arguments."""
    args, kwargs, leaves = with_leaves(args, kwargs, names)
    y = as_tuple(function(*args, **kwargs))[0]
    y.backward(random_values(*y.shape, dtype=torch.float32, device=y.device, seed=8).clamp(-9, 9).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves.values())]


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_gradients_compile_with_every_differentiable_argument_as_an_input_of_the_graph(case: Case, backend, device):
    args, kwargs = case.make(device, 70)
    floating = [
        name
        for name, value in {**dict(enumerate(args)), **kwargs}.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    # First all arguments require gradients, then each one alone, because no gradient may depend on another being asked for.
    # Inductor is slow and gets the first case only.
    alone = [[name] for name in floating] if backend == "aot_eager" and len(floating) > 1 else []
    for names in [floating, *alone]:
        torch._dynamo.reset()
        function = torch.compile(lambda *args, **kwargs: case.op(*args, **kwargs), backend=backend, fullgraph=True)
        expected = step(case.op, args, kwargs, names)
        assert all(grad is not None for grad in expected), names
        assert_same_bytes(step(function, args, kwargs, names), expected, f"{names}")


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_the_number_of_rows_may_depend_on_data(device):
    """The number of rows comes from a mask, so it is unknown while tracing, as it is after ranks have exchanged tokens."""

    def chosen(x, mask, offs):
        y = x[mask]
        qdata, scale, qdata_t, scale_t = moxie.quantize_both(y, offs=offs)
        padded, starts, _ = moxie.pad_groups(qdata, offs, 16)
        swizzled = moxie.swizzle_scale(scale, offs=offs)
        return (
            qdata,
            scale,
            qdata_t,
            scale_t,
            moxie.dequantize_colwise(qdata_t, scale_t, y.shape[0], offs=offs),
            moxie.unpad_groups(padded, offs, starts, y.shape[0]),
            *moxie.requantize(qdata, scale, offs=offs),
            moxie.unswizzle_scale(swizzled, y.shape[0], scale.shape[1], offs=offs),
            moxie.dequantize_rowwise(qdata, swizzled, offs=offs, scale_layout="swizzled"),
            *moxie.requantize(qdata, swizzled, offs=offs, from_layout="swizzled"),
        )

    function, counter = compiled(chosen, "aot_eager")
    for rows in SIZES:
        x, mask = random_values(rows, 96, device=device), torch.rand(rows, device=device) > 0.3
        inputs = x, mask, sizes_to_offs([5, 0, int(mask.sum()) - 5], device)
        assert_same_bytes(function(*inputs), chosen(*inputs))
    assert counter.frame_count == 1


def test_a_bad_call_is_refused_while_tracing(device):
    function, _ = compiled(lambda x: moxie.quantize_rowwise(x, block="32x1"), "aot_eager")
    with pytest.raises(Exception, match="quantize_rowwise: the rowwise form contracts columns"):
        function(torch.zeros(4, 32, device=device))


def test_a_row_count_that_is_data_compiles(device):
    @torch.compile(fullgraph=True)
    def there_and_back(x, offs):
        rows = offs[-1].item()
        torch._check(rows >= 0)
        torch._check(rows <= x.size(0))
        return moxie.dequantize_colwise(*moxie.quantize_colwise(x[:rows]), rows)

    x, offs = torch.randn(64, 32, device=device), torch.tensor([40], device=device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        actual = there_and_back(x, offs)
    assert torch.equal(actual, moxie.dequantize_colwise(*moxie.quantize_colwise(x[:40]), 40))
