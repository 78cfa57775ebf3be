"""What torch requires of an op: schema, fake tensors, autograd registration, AOT dispatch with dynamic shapes."""

import pytest
import torch
from torch.library import opcheck

import moxie  # noqa: F401
from support import CASES, Case, as_bytes, as_tuple, assert_same_bytes, call, out_case

FP8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
OUT_CASES = [case for case in CASES if "out" in getattr(torch.ops.moxie, case.name.split("-")[0]).overloads()]


def tensors_in(args, kwargs) -> dict[str, torch.Tensor]:
    named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def checks_for(args, kwargs, fp8_inside: bool = False) -> list[str]:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # test_schema does arithmetic on an op's inputs, which FP8 dtypes do not support. For such ops, other tests here compare
    # bytes.
    return checks[1:] if fp8_inside or any(t.dtype in FP8 for t in tensors_in(args, kwargs).values()) else checks


def test_every_op_has_a_case():
    ops = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("moxie::")}
    # Ops whose names start with _ are internal. Those that end in _ write in place and return nothing to compare.
    ops = {name for name in ops if not name.startswith("_") and not name.endswith("_")}
    assert ops == {case.name.split("-")[0] for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_obeys_torch(case: Case, device):
    args, kwargs = case.make(device, 70)
    opcheck(case.op, args, kwargs, test_utils=checks_for(args, kwargs, case.is_differentiable))


@pytest.mark.parametrize("case", OUT_CASES, ids=str)
def test_out_overload_obeys_torch(case: Case, device):
    op, args, kwargs, _ = out_case(case, device)
    opcheck(op, args, kwargs, test_utils=checks_for(args, kwargs))


@pytest.mark.parametrize("op_name", ("quantize_both", "pad_groups"))
def test_op_obeys_torch_when_its_input_requires_grad(op_name, device):
    case = next(case for case in CASES if case.name == op_name)
    args, kwargs = case.make(device, 70)
    args[0].requires_grad_()
    opcheck(case.op, args, kwargs)


@pytest.mark.parametrize("case", [case for case in CASES if case.is_differentiable], ids=str)
def test_differentiable_op_obeys_torch(case: Case, device):
    args, kwargs = case.make(device, 70)
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    opcheck(case.op, args, kwargs, test_utils=checks_for(args, kwargs, fp8_inside=True))


def test_the_sum_into_a_gradient_writes_it_and_nothing_else(device):
    args, kwargs = next(case for case in CASES if case.name == "grouped_wgrad").make(device, 70)
    expected = torch.ops.moxie.grouped_wgrad(*args, **kwargs, dtype=torch.float32)
    dw, op = torch.ones_like(expected), torch.ops.moxie.grouped_wgrad_add_.default
    before = [as_bytes(tensor).clone() for tensor in tensors_in(args, {}).values()]
    version = dw._version
    assert op(dw, *args, **kwargs) is None
    assert dw._version > version, "autograd must see the write"
    torch.testing.assert_close(dw, expected + 1)
    assert_same_bytes([as_bytes(tensor) for tensor in tensors_in(args, {}).values()], before)
    opcheck(op, (dw, *args), kwargs, test_utils=checks_for(args, kwargs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_changes_no_input_and_its_results_own_their_memory(case: Case, device):
    args, kwargs = case.make(device, 70)
    inputs = tensors_in(args, kwargs)
    before = {name: as_bytes(tensor).clone() for name, tensor in inputs.items()}
    results = as_tuple(case.op(*args, **kwargs))
    for name, tensor in inputs.items():
        assert_same_bytes(as_bytes(tensor), before[name], name)
    storages = [t.untyped_storage().data_ptr() for t in (*inputs.values(), *results)]
    assert len(set(storages)) == len(storages)
    assert all(t.is_contiguous() and t.storage_offset() == 0 for t in results)


@pytest.mark.parametrize("case", OUT_CASES, ids=str)
def test_out_overload_writes_its_outputs_and_nothing_else(case: Case, device):
    op, args, kwargs, names = out_case(case, device)
    inputs = {name: t for name, t in tensors_in(args, kwargs).items() if name not in names}
    before = {name: as_bytes(tensor).clone() for name, tensor in inputs.items()}
    outputs = [kwargs[name] for name in names]
    versions = [t._version for t in outputs]
    assert op(*args, **kwargs) is None
    for name, tensor in inputs.items():
        assert_same_bytes(as_bytes(tensor), before[name], name)
    assert_same_bytes(outputs, as_tuple(call(case, device)))
    assert all(t._version > version for t, version in zip(outputs, versions)), "autograd must see the writes"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_meta_tensors_give_the_shapes_that_run(case: Case, device):
    args, kwargs = case.make(device, 70)

    def meta(value):
        if isinstance(value, list):
            return [meta(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    shapes = as_tuple(case.op(*map(meta, args), **{name: meta(value) for name, value in kwargs.items()}))
    if case.name == "quantize_weights":  # the scale layout depends on the device; meta tensors are on none and get the CPU's
        args, kwargs = case.make("cpu", 70)
    for traced, real in zip(shapes, as_tuple(case.op(*args, **kwargs)), strict=True):
        assert traced.is_meta
        assert (traced.shape, traced.stride(), traced.dtype) == (real.shape, real.stride(), real.dtype)
