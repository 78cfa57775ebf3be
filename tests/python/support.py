"""What the tests share: byte comparison, random tensors, ragged groups, and a call of every op."""

import dataclasses
import random
import typing
from collections.abc import Callable
from typing import Any

import torch

import moxie
import moxie.ops

RULES = ("rceil", "floor", "ceil", "even")
BLOCKS = typing.get_args(moxie.ops.Block)
ROWWISE_BLOCKS = tuple(block for block in BLOCKS if not block.endswith("x1"))
COLWISE_BLOCKS = tuple(block for block in BLOCKS if not block.startswith("1x"))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes, on the CPU. Both NaN codes of e4m3 become 0x7f, so that the sign of a NaN does not matter."""
    raw = tensor.detach().contiguous().view(torch.uint8).cpu()
    return torch.where(raw == 0xFF, 0x7F, raw) if tensor.dtype == torch.float8_e4m3fn else raw


def assert_same_bytes(actual, expected, what: str = "") -> None:
    """Asserts that two tensors, or two tuples of tensors, are equal in dtype, shape and every byte."""
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for i, pair in enumerate(zip(actual, expected)):
            assert_same_bytes(*pair, f"{what}[{i}]")
        return
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{what}: {actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}"
    )
    a, b = as_bytes(actual), as_bytes(expected)
    if not torch.equal(a, b):
        wrong = (a != b).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.numel()} bytes differ, first at {first}: {a[first]:#x} is not {b[first]:#x}"
        )


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e8m0fnu)


def block_shape(block: str) -> tuple[int, int]:
    rows, cols = block.split("x")
    return int(rows), int(cols)


def random_values(*shape: int, dtype=torch.bfloat16, device="cpu", seed: int = 0) -> torch.Tensor:
    """Normally distributed values times random powers of two from 2^-20 to 2^20, with single zeros and a run of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-20, 21, shape[:-1], generator=generator).float()).unsqueeze(-1)
    x[torch.rand(shape, generator=generator) < 0.01] = 0.0
    if x.numel():
        x[..., : shape[-1] // 3] *= (torch.rand(shape[:-1], generator=generator) > 0.05).float().unsqueeze(-1)
    return x.to(dtype).to(device)


def ragged_offs(rows: int, groups: int, rng: random.Random, device="cpu", cover: bool = False) -> torch.Tensor:
    """Returns random exclusive ends of groups, of which some may be empty. Unless `cover`, rows may remain past the last end."""
    ends = sorted(rng.choice([rng.randint(0, rows), rng.randint(0, rows) // 32 * 32]) for _ in range(groups))
    if cover:
        ends[-1] = rows
    return torch.tensor(ends, dtype=torch.int32, device=device)


def sizes_to_offs(sizes, device="cpu") -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


@dataclasses.dataclass
class Case:
    """One call of one op. Its name is that of the op, followed by "-" and the variant."""

    name: str
    make: Callable[[str, int], tuple[tuple, dict[str, Any]]]  # (device, rows) -> args, kwargs
    overload: str = "default"

    @property
    def is_differentiable(self) -> bool:
        """Whether the op is differentiable. Such ops are composed of other ops and pass FP8 tensors between them."""
        return self.overload == "default" and self.name.split("-")[0] in (
            "grouped_mm",
            "expert_mlp",
            "swiglu",
            "gate_logits",
            "permute",
            "unpermute",
        )

    @property
    def op(self):
        return getattr(getattr(torch.ops.moxie, self.name.split("-")[0]), self.overload)

    def __str__(self) -> str:
        return self.name


def _tokens(device: str, rows: int):
    x = random_values(rows, 96, device=device)
    return x, sizes_to_offs([5, 0, 33, rows - 40], device)


def _weights(device: str, rows: int):
    return random_values(3, rows, 96, dtype=torch.float32, device=device)


def _with_offs(name: str, *args, **kwargs) -> Case:
    def make(device, rows):
        x, offs = _tokens(device, rows)
        return (x, *args), {"offs": offs, **kwargs}

    return Case(name, make)


def _rowwise_form(device, rows):
    return moxie.quantize_rowwise(_tokens(device, rows)[0])


def _dequantize_colwise_grouped(device, rows):
    x, offs = _tokens(device, rows)
    return (*moxie.quantize_colwise(x, offs=offs), rows), {"offs": offs, "dtype": torch.float32}


def _swizzled_grouped(form: str, **kwargs):
    def make(device, rows):
        x, offs = _tokens(device, rows)
        operand = getattr(moxie, "quantize_" + form)(x, offs=offs, scale_layout="swizzled")
        return (*operand, *([rows] if form == "colwise" else [])), {"offs": offs, **kwargs}

    return make


def _swizzled_weights(device, rows):
    return moxie.quantize_rowwise(_weights(device, rows), scale_layout="swizzled"), {"from_layout": "swizzled"}


def _swizzle_grouped(device, rows):
    x, offs = _tokens(device, rows)
    return (moxie.quantize_rowwise(x)[1],), {"offs": offs}


def _unswizzle_stack(device, rows):
    scale = moxie.quantize_rowwise(_weights(device, rows))[1]
    return (moxie.swizzle_scale(scale), rows, 3), {}


def _replicate(device, rows):
    # Blocks of 128x128 would give dims of size 1, for which torch.compile always recompiles.
    return (moxie.quantize_rowwise(_weights(device, rows), block="32x32")[1], rows, 96), {"block": "32x32"}


def _compact(device, rows):
    (scale, outer, k), kwargs = _replicate(device, rows)
    return (moxie.replicate_scale(scale, outer, k, **kwargs),), kwargs


def _pad(device, rows):
    return _tokens(device, rows), {}


def _pad_fp8(device, rows):
    x, offs = _tokens(device, rows)
    return (moxie.quantize_rowwise(x)[0], offs, 16), {}


def _unpad(device, rows):
    x, offs = _tokens(device, rows)
    padded, starts, _ = moxie.pad_groups(x, offs)
    return (padded, offs, starts, rows), {}


def _linear(device, rows):
    """Returns x, w and offs of a grouped product with this number of rows."""
    x, offs = _tokens(device, rows)
    return x, random_values(4, 40, 96, dtype=torch.float32, device=device, seed=1).clamp(-9, 9), offs


def _mlp(device, rows):
    x, offs = _tokens(device, rows)
    w13, w2 = (torch.randn(4, *shape, generator=torch.Generator().manual_seed(2)).to(device) for shape in ((80, 96), (96, 40)))
    return (x, w13, w2, offs), {"recipe": "mxfp8_rceil"}


def _mlp_of_tokens(device, rows):
    x, slot_of, row_of, _ = _routed(device, rows)
    w13, w2 = (torch.randn(4, *shape, generator=torch.Generator().manual_seed(2)).to(device) for shape in ((80, 40), (40, 40)))
    offs = sizes_to_offs([5, 0, 33, 2 * rows - 38], device)
    return (x, w13, w2, offs), {"recipe": "mxfp8_rceil", "slot_of": slot_of, "row_of": row_of, "top_k": 2}


def _mlp_of_gpt_oss(device, rows):
    (x, w13, w2, offs), options = _mlp_of_tokens(device, rows)
    b13, b2 = (torch.randn(4, width, generator=torch.Generator().manual_seed(3)).to(device) for width in (80, 40))
    stored13, stored2 = (w.mT.contiguous() for w in (w13, w2))
    weights = torch.rand(rows, 2, generator=torch.Generator().manual_seed(4)).to(device)
    options |= {"b13": b13, "b2": b2, "weights": weights, "activation": "clamped_swiglu", "w13_layout": "interleaved"}
    return (x, stored13.mT, stored2.mT, offs), options


def _grouped_mm(device, rows, recipe, **kwargs):
    args = _linear(device, rows)
    bias = torch.randn(4, 40, generator=torch.Generator().manual_seed(3)).to(device)
    return args, {"recipe": recipe, "bias": bias, **kwargs}


def _grouped_mm_cached(device, rows):
    w = _linear(device, rows)[1]
    return _grouped_mm(device, rows, "mxfp8_rceil", quantized_w=list(moxie.quantize_weights(w, recipe="mxfp8_rceil")))


def _passes(device, rows):
    """Returns the operands of all three passes: both forms of x, w and dy, and offs."""
    x, w, offs = _linear(device, rows)
    dy = random_values(rows, 40, device=device, seed=4)
    return (
        moxie.quantize_both(x, offs=offs),
        moxie.quantize_weights(w, recipe="mxfp8_rceil"),
        moxie.quantize_both(dy, offs=offs),
        offs,
    )


def _forward(device, rows):
    x, w, _, offs = _passes(device, rows)
    return (*x[:2], *w[:2], offs), {"recipe": "mxfp8_rceil"}


def _dgrad(device, rows):
    _, w, dy, offs = _passes(device, rows)
    return (*dy[:2], *w[2:], offs), {"recipe": "mxfp8_rceil", "dtype": torch.float32}


def _wgrad(device, rows):
    x, _, dy, offs = _passes(device, rows)
    return (*dy[2:], *x[2:], rows, offs), {"recipe": "mxfp8_rceil"}


def _wgrad_swizzled(device, rows):
    x, _, offs = _linear(device, rows)
    forms = [
        moxie.quantize_colwise(t, offs=offs, scale_layout="swizzled") for t in (random_values(rows, 40, device=device, seed=4), x)
    ]
    return (*forms[0], *forms[1], rows, offs), {"recipe": "mxfp8_rceil", "scale_layout": "swizzled"}


def _wgrad_hp(device, rows):
    x, _, offs = _linear(device, rows)
    return (random_values(rows, 40, device=device), None, x, None, rows, offs), {"recipe": "bf16"}


def _swiglu_backward(device, rows):
    return (random_values(rows, 48, device=device, seed=5).clamp(-9, 9), _tokens(device, rows)[0].clamp(-9, 9)), {}


def _fused(device, rows, *inputs):
    """Returns the arguments of an op that is fused with quantize_both, with groups and blocks of 128."""
    return inputs, {"offs": ragged_offs(rows, 3, random.Random(1), device), "rowwise_block": "1x128", "colwise_block": "128x32"}


def _routed(device, rows):
    """Tokens that each go to two of five experts: x [rows, 40], slot_of, row_of and weights [rows, 2]."""
    x = random_values(rows, 40, device=device, seed=6).clamp(-9, 9)
    ids = torch.ops.moxie.top_k(random_values(rows, 5, device=device, dtype=torch.float32, seed=7), 2)
    _, slot_of, row_of = torch.ops.moxie.route(ids, 5)
    return x, slot_of, row_of, torch.rand(rows, 2, device=device)


def _permute(device, rows):
    x, slot_of, row_of, _ = _routed(device, rows)
    return (x, slot_of, row_of, 2), {}


def _unpermute(device, rows):
    x, slot_of, row_of, weights = _routed(device, rows)
    return (x.repeat(2, 1), slot_of, row_of, rows), {"weights": weights}


def _unpermute_weights(device, rows):
    x, _, row_of, _ = _routed(device, rows)
    return (x, x.repeat(2, 1), row_of, 2), {}


def _route(device, rows):
    scores = random_values(rows, 5, device=device, dtype=torch.float32, seed=7)
    return (torch.ops.moxie.top_k(scores, 2), 5), {}


# One case per op and per branch of its shape function. (grouped_wgrad_add_ is missing because it returns nothing; it has tests of
# its own.)
CASES = [
    Case("quantize_rowwise", lambda device, rows: ((_tokens(device, rows)[0],), {})),
    _with_offs("quantize_rowwise-grouped_swizzled", scale_layout="swizzled"),
    Case("quantize_rowwise-weights", lambda device, rows: ((_weights(device, rows),), {"block": "32x32"})),
    Case("quantize_colwise", lambda device, rows: ((_tokens(device, rows)[0],), {})),
    _with_offs("quantize_colwise-grouped", block="128x32", rule="floor"),
    _with_offs("quantize_colwise-grouped_swizzled", scale_layout="swizzled"),
    _with_offs("quantize_both", rowwise_block="1x128", colwise_block="128x1"),
    Case("quantize_both-weights", lambda device, rows: ((_weights(device, rows),), {"scale_layout": "swizzled", "rule": "even"})),
    Case("dequantize_rowwise", lambda device, rows: (_rowwise_form(device, rows), {})),
    Case("dequantize_colwise", _dequantize_colwise_grouped),
    Case("dequantize_rowwise-swizzled", _swizzled_grouped("rowwise", scale_layout="swizzled")),
    Case("dequantize_colwise-swizzled", _swizzled_grouped("colwise", scale_layout="swizzled")),
    Case("requantize", lambda device, rows: (_rowwise_form(device, rows), {"rule": "ceil"})),
    Case("requantize-swizzled", _swizzled_grouped("rowwise", from_layout="swizzled", scale_layout="swizzled")),
    Case("requantize-swizzled_weights", _swizzled_weights),
    _with_offs("quantize_per_row"),
    _with_offs("quantize_per_col"),
    Case("quantize_per_col-weights", lambda device, rows: ((_weights(device, rows),), {})),
    Case("swizzle_scale", _swizzle_grouped),
    Case("unswizzle_scale", _unswizzle_stack),
    Case("replicate_scale", _replicate),
    Case("compact_scale", _compact),
    Case("pad_groups", _pad),
    Case("pad_groups-fp8", _pad_fp8),
    Case("unpad_groups", _unpad),
    Case("padded_offs", lambda device, rows: ((_tokens(device, rows)[1], 128), {})),
    Case("grouped_mm", lambda device, rows: _grouped_mm(device, rows, "mxfp8_rceil_128")),
    Case("grouped_mm-rowwise", lambda device, rows: _grouped_mm(device, rows, "fp8_rowwise", dtype=torch.float32)),
    Case("grouped_mm-bf16", lambda device, rows: _grouped_mm(device, rows, "bf16")),
    Case("grouped_mm-cached", _grouped_mm_cached),
    Case("expert_mlp", _mlp),
    Case("expert_mlp-permuted", _mlp_of_tokens),
    Case("expert_mlp-gpt_oss", _mlp_of_gpt_oss),
    Case(
        "swiglu-clamped",
        lambda device, rows: ((_tokens(device, rows)[0].clamp(-9, 9),), {"activation": "clamped_swiglu"}),
    ),
    Case(
        "swiglu_quantize_rowwise-clamped",
        lambda device, rows: ((_tokens(device, rows)[0].clamp(-9, 9),), {"activation": "clamped_swiglu"}),
    ),
    Case("swiglu", lambda device, rows: ((_tokens(device, rows)[0].clamp(-9, 9),), {})),
    Case("swiglu_backward", _swiglu_backward),
    Case("swiglu_quantize_rowwise", lambda device, rows: ((_tokens(device, rows)[0].clamp(-9, 9),), {"rule": "floor"})),
    Case("swiglu_quantize_both", lambda device, rows: _fused(device, rows, _tokens(device, rows)[0].clamp(-9, 9))),
    Case("swiglu_backward_quantize_both", lambda device, rows: _fused(device, rows, *_swiglu_backward(device, rows)[0])),
    Case(
        "gate_logits",
        lambda device, rows: ((random_values(rows, 40, device=device).clamp(-9, 9), torch.randn(5, 40, device=device)), {}),
    ),
    Case("top_k", lambda device, rows: ((random_values(rows, 9, device=device, dtype=torch.float32), 3), {})),
    Case("route", _route),
    Case("permute", _permute),
    Case(
        "permute_quantize_rowwise",
        lambda device, rows: ((*_routed(device, rows)[:2], 2), {"block": "1x128", "scale_layout": "swizzled"}),
    ),
    Case("permute_quantize_both", lambda device, rows: _fused(device, 2 * rows, *_routed(device, rows)[:2], 2)),
    Case("unpermute", _unpermute),
    Case("unpermute_weights", _unpermute_weights),
    Case("grouped_fwd", _forward),
    Case("grouped_dgrad", _dgrad),
    Case("grouped_wgrad", _wgrad),
    Case("grouped_wgrad-swizzled", _wgrad_swizzled),
    Case("grouped_wgrad-hp", _wgrad_hp),
    Case("sum_groups", lambda device, rows: (_tokens(device, rows), {})),
    Case(
        "quantization_stats",
        lambda device, rows: (
            (_tokens(device, rows)[0].clamp(-9, 9), _tokens(device, rows)[1]),
            {"recipe": "mxfp8_floor", "part": "x_t"},
        ),
    ),
    Case("quantization_stats-weights", lambda device, rows: ((_weights(device, rows).clamp(-9, 9),), {"part": "w_t"})),
    Case("quantize_weights", lambda device, rows: ((_weights(device, rows),), {"recipe": "mxfp8_rceil"})),
]


def call(case: Case, device: str, rows: int = 70):
    args, kwargs = case.make(device, rows)
    return case.op(*args, **kwargs)


def as_tuple(result) -> tuple:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def out_case(case: Case, device: str, rows: int = 70):
    """Returns the case's call through the `out` overload, (op, args, kwargs with new outputs, names of outputs), or None."""
    packet = getattr(torch.ops.moxie, case.name.split("-")[0])
    if "out" not in packet.overloads():
        return None
    names = [arg.name for arg in packet.out._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    args, kwargs = case.make(device, rows)
    results = as_tuple(case.op(*args, **kwargs))
    outputs = {name: poisoned(result) for name, result in zip(names, results, strict=True)}
    return packet.out, args, {k: v for k, v in kwargs.items() if k != "dtype"} | outputs, names


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape and dtype, full of 0x5a bytes, to show which elements an op writes."""
    tensor = torch.empty_like(like)
    tensor.view(torch.uint8).fill_(0x5A)
    return tensor


class Buffer:
    """Copies a tensor into a larger buffer, `offset` elements after a 16-byte boundary, with guard elements on both sides."""

    def __init__(self, tensor: torch.Tensor, offset: int = 0):
        self.flat = poisoned(torch.empty(16 + tensor.numel() + 32, dtype=tensor.dtype, device=tensor.device))
        begin = 16 + offset
        self.view = self.flat[begin : begin + tensor.numel()].view(tensor.shape)
        as_numbers(self.view).copy_(as_numbers(tensor))
        self.guards = self.flat[:begin], self.flat[begin + tensor.numel() :]

    def check(self) -> None:
        for guard in self.guards:
            assert (guard.view(torch.uint8) == 0x5A).all(), "written outside"


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Views FP8 tensors as bytes, for which torch implements every copy."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
