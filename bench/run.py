#!/usr/bin/env python3
"""Measures every op: time, GB/s over the bytes that core/cost counts, and the share of a copy's bandwidth in the same run.

    bench/run.py [--device cpu|cuda] [--shapes 8192x5120 8x2048x2048] [--ops both pad] [--quick] [--out file.json]

Prints a table at the end, and writes JSON. bench/README.md describes the method.
"""

import argparse
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable

import harness  # before torch

# isort: split
import torch

import group_sizes
import moxie

COPY_BYTES = 2**30
ROTATE_BYTES = 2**28  # an op's sets of buffers, used in turn, take at least this much memory: more than any cache holds
BF16, F32 = torch.bfloat16, torch.float32

SHAPES = {
    "cpu": ["8192x5120", "8x2048x2048"],
    "cuda": ["131072x2048", "131072x5120", "131072x7168", "131072x8192", "8x8192x5120", "8x2048x7168"],
}
# Shapes that a GPU measures too unless --shapes is given: for swizzling scales, for padding groups, and for weights.
SCALES_SHAPE = (131072, 7168)
PAD_GRID = [((16384, dim), groups) for dim in (1536, 2048, 5120, 7168) for groups in (1, 4, 8, 16)]
WEIGHT_GRID = [(experts, *matrix) for matrix in ((8192, 5120), (7168, 2048)) for experts in (1, 8, 32)]
TOP_K, EXPERTS = 8, 64  # of the rows that are permuted
QUICK_SHAPES = {"cpu": ["512x1024", "2x256x512"], "cuda": ["8192x5120", "2x2048x5120"]}


@dataclasses.dataclass
class Bench:
    """One line of the table. calls run the op, each on its own set of buffers; repetition i runs calls[i % len(calls)]."""

    op: str
    variant: str
    shape: tuple[int, ...]
    num_groups: int | None
    calls: list[Callable[[], object]]
    num_bytes: float
    peer: Callable[[], object] | None = None  # the same result with torchao
    parts: int = 1  # how many times a call runs the op, on num_bytes each
    seconds: list[float] = dataclasses.field(default_factory=list)
    peer_seconds: list[float] = dataclasses.field(default_factory=list)


# ---- what is measured --------------------------------------------------------------------------------------------------------


def random_tensor(shape, dtype, device) -> torch.Tensor:
    """Normal values, each row scaled by a random power of two; never zeros, which are faster on some machines."""
    x = torch.randn(shape, device=device, dtype=dtype)
    return x.mul_(torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), device=device).to(dtype)))


def like(results):
    """Outputs for the `out` overload. They are written to once, so that no page fault is measured."""
    many = isinstance(results, tuple)
    outputs = tuple(torch.empty_like(t) for t in (results if many else (results,)))
    for t in outputs:
        t.view(torch.uint8).fill_(1)
    return outputs if many else outputs[0]


class Torchao:
    """torchao's functions that compute the same results, if torchao is installed."""

    def __init__(self):
        try:
            from torchao.prototype.moe_training.kernels.mxfp8 import quant
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
        except ImportError:
            self.rowwise = self.colwise = self.both = self.dequantize = self.pad = self.unpad = None
            return
        rule, e4m3 = ScaleCalculationMode.RCEIL, torch.float8_e4m3fn
        self.rowwise = lambda x: to_mx(x, e4m3, 32, rule)
        self.colwise = lambda x: to_mx(x.mT.contiguous(), e4m3, 32, rule)
        self.both = lambda x: (self.rowwise(x), self.colwise(x))
        self.dequantize = lambda qdata, scale: to_dtype(qdata, scale, e4m3, 32, BF16)
        self.pad = lambda x, offs: quant.torch_pad_token_groups(x, offs, 32)
        self.unpad = lambda padded, offs, starts, rows: quant.torch_unpad_token_groups(padded, offs, starts, rows, 32)


class Plan:
    """Makes the benches of one shape."""

    def __init__(self, shape: tuple[int, ...], num_groups: int, options: argparse.Namespace, torchao: Torchao):
        self.shape, self.device, self.torchao, self.wanted = shape, options.device, torchao, options.ops
        self.tokens, self.half_empty = len(shape) == 2, options.half_empty
        self.num_groups = num_groups if self.tokens else None
        sizes = (group_sizes.half_empty if options.half_empty else group_sizes.random_ends)(shape[0], num_groups)
        self.offs = group_sizes.offs_of(sizes, options.device) if self.tokens else None
        self.inputs: dict[torch.dtype, list[torch.Tensor]] = {}
        self.benches: list[Bench] = []

    def x(self, dtype=BF16) -> list[torch.Tensor]:
        if dtype not in self.inputs:
            size = math.prod(self.shape) * dtype.itemsize
            least = 1 if self.device == "cuda" and size >= ROTATE_BYTES else 2  # larger than any GPU cache
            count = min(8, max(least, math.ceil(ROTATE_BYTES / size)))
            self.inputs[dtype] = [random_tensor(self.shape, dtype, self.device) for _ in range(count)]
        return self.inputs[dtype]

    def wants(self, op: str, variant: str) -> bool:
        return not self.wanted or any(part in f"{op} {variant}" for part in self.wanted)

    def add(self, op: str, variant: str, inputs: list[tuple], peer=None, dtype=BF16, cost=None, num_bytes=None, **kwargs) -> None:
        """Adds a bench. inputs: a tuple of arguments per set of buffers; kwargs: the op's other arguments; cost: arguments of
        core/cost, which counts the bytes unless num_bytes is given.
        """
        if not self.wants(op, variant):
            return
        function = getattr(moxie, op)
        calls = []
        for args in inputs:
            if "out" not in inspect.signature(function).parameters:
                calls.append(lambda args=args: function(*args, **kwargs))
                continue
            out = like(function(*args, **kwargs))
            calls.append(lambda args=args, out=out: function(*args, **kwargs, out=out))
        if num_bytes is None:
            _, read, written = torch.ops.moxie._cost(
                op, list(self.shape), dtype=dtype, num_groups=self.num_groups, **(cost or {})
            )
            num_bytes = read + written
        self.benches.append(
            Bench(op, variant, self.shape, self.num_groups, calls, num_bytes, peer and (lambda: peer(*inputs[0])))
        )

    def add_all(self) -> list[Bench]:
        x = [(x,) for x in self.x()]
        grouped = {"offs": self.offs} if self.tokens else {}
        self.add("quantize_rowwise", "1x32 bf16", x, self.torchao.rowwise, **grouped)
        if self.wants("quantize_rowwise", "1x32 f32"):
            x32 = [(x,) for x in self.x(F32)]
            self.add("quantize_rowwise", "1x32 f32", x32, self.torchao.rowwise, F32, **grouped)
        self.add("quantize_colwise", "32x1 bf16", x, self.torchao.colwise, **grouped)
        self.add("quantize_both", "1x32 + 32x1 bf16", x, self.torchao.both, **grouped)
        self.add(
            "quantize_both",
            "1x32 + 32x1 bf16 swizzled",
            x,
            self.torchao.both,
            cost={"scale_layout": "swizzled"},
            scale_layout="swizzled",
            **grouped,
        )
        if self.tokens:
            self.add_tokens(x)
        else:
            self.add_weights(x)
        return self.benches

    def add_tokens(self, x: list[tuple]) -> None:
        offs = {"offs": self.offs}
        blocks = {"rowwise_block": "1x128", "colwise_block": "128x32"}
        self.add("quantize_rowwise", "1x128 bf16", x, cost={"rowwise_block": "1x128"}, block="1x128", **offs)
        self.add("quantize_both", "1x128 + 128x32 bf16", x, cost=blocks, **blocks, **offs)
        # Blocks and layouts that mxfp8_rceil_128 has on Hopper: 128x32 for x, 128x1 for dy.
        for col in ("128x32", "128x1") if self.device == "cuda" else ():
            layout = {"scale_layout": "quads"}
            both = {"rowwise_block": "1x128", "colwise_block": col, **layout}
            self.add("quantize_both", f"1x128 + {col} bf16 quads", x, cost=both, **both, **offs)
            self.add(
                "quantize_colwise", f"{col} bf16 quads", x, cost={"colwise_block": col, **layout}, block=col, **layout, **offs
            )
        rowwise = [moxie.quantize_rowwise(*x, **offs) for x in x]
        colwise = [(*moxie.quantize_colwise(*x, **offs), self.shape[0]) for x in x]
        self.add("dequantize_rowwise", "1x32 bf16", rowwise, self.torchao.dequantize, **offs)
        self.add("dequantize_colwise", "32x1 bf16", colwise, **offs)
        self.add("requantize", "1x32 -> 32x1", rowwise, **offs)
        if self.device == "cuda":
            wide = [moxie.quantize_rowwise(*x, block="1x128", **offs) for x in x]
            self.add("requantize", "1x128 -> 128x32", wide, cost=blocks, block="1x128", colwise_block="128x32", **offs)
            self.add_readers(x)
        self.add("quantize_per_row", "bf16", x, **offs)
        self.add("quantize_per_col", "bf16", x, **offs)
        padded = [moxie.pad_groups(*x, self.offs) for x in x]
        self.add("pad_groups", "32 bf16", [(*x, self.offs) for x in x], self.torchao.pad)
        self.add(
            "unpad_groups", "32 bf16", [(p, self.offs, starts, self.shape[0]) for p, starts, _ in padded], self.torchao.unpad
        )
        self.add_layer(x)

    def add_readers(self, x: list[tuple]) -> None:
        """Adds the ops that read swizzled scales or quads; requantize also writes them."""
        swizzled, quads = {"scale_layout": "swizzled"}, {"scale_layout": "quads"}
        offs = {"offs": self.offs}
        rowwise = [moxie.quantize_rowwise(*x, **swizzled, **offs) for x in x]
        colwise = [(*moxie.quantize_colwise(*x, **swizzled, **offs), self.shape[0]) for x in x]
        wide = [moxie.quantize_rowwise(*x, block="1x128", **quads, **offs) for x in x]
        self.add("dequantize_rowwise", "1x32 bf16 swizzled", rowwise, cost=swizzled, **swizzled, **offs)
        self.add("dequantize_colwise", "32x1 bf16 swizzled", colwise, cost=swizzled, **swizzled, **offs)
        self.add(
            "dequantize_rowwise",
            "1x128 bf16 quads",
            wide,
            cost={"rowwise_block": "1x128", **quads},
            block="1x128",
            **quads,
            **offs,
        )
        tall = [(*moxie.quantize_colwise(*x, block="128x32", **quads, **offs), self.shape[0]) for x in x]
        self.add(
            "dequantize_colwise",
            "128x32 bf16 quads",
            tall,
            cost={"colwise_block": "128x32", **quads},
            block="128x32",
            **quads,
            **offs,
        )
        for block, col, layout, inputs in (
            ("1x32", "32x1", "swizzled", rowwise),
            ("1x128", "128x32", "quads", wide),
            ("1x128", "128x1", "quads", wide),
        ):
            layouts = {"from_layout": layout, "scale_layout": layout}
            self.add(
                "requantize",
                f"{block} -> {col} {layout}",
                inputs,
                cost={"rowwise_block": block, "colwise_block": col, **layouts},
                block=block,
                colwise_block=col,
                **layouts,
                **offs,
            )

    def add_layer(self, x: list[tuple]) -> None:
        """Adds the ops between the GEMMs of an MoE layer, alone and fused with the quantizer. x: the rows of the experts."""
        rows, dim = self.shape
        offs = {"offs": self.offs}
        one = rows * dim * BF16.itemsize  # bytes of [rows, dim]
        wide = torch.cat([x[0][0], x[-1][0]], 1)  # [rows, 2 * dim]
        self.add("swiglu", "bf16", [(wide,)], num_bytes=3 * one)
        self.add("swiglu_backward", "bf16", [(*x[0], wide)], num_bytes=5 * one)
        blocks = {"rowwise_block": "1x128", "colwise_block": "128x32"}
        kinds = {"1x32 + 32x1": {}, "1x32 + 32x1 swizzled": {"scale_layout": "swizzled"}, "1x128 + 128x32": blocks}
        quads = {"rowwise_block": "1x128", "scale_layout": "quads"}
        if self.device == "cuda":
            kinds |= {f"1x128 + {col} quads": {"colwise_block": col, **quads} for col in ("128x32", "128x1")}
        for variant, kind in kinds.items():
            both = self.bytes_of("quantize_both", **kind) - one  # bytes written: both forms of [rows, dim]
            self.add("swiglu_quantize_both", variant, [(wide,)], num_bytes=2 * one + both, **kind, **offs)
            self.add("swiglu_backward_quantize_both", variant, [(*x[0], wide)], num_bytes=3 * one + 2 * both, **kind, **offs)
        tokens = rows // TOP_K
        if tokens == 0 or self.half_empty:  # the experts drawn below are random, so groups cannot be half empty
            return
        ids = torch.rand(tokens, EXPERTS, device=self.device).topk(TOP_K).indices.to(torch.int32)
        ends, slot_of, row_of = moxie.route(ids, EXPERTS)
        some = [(x[:tokens].contiguous(),) for (x,) in x]
        weights = torch.rand(tokens, TOP_K, device=self.device)
        self.add("route", f"{TOP_K} of {EXPERTS}", [(ids, EXPERTS)], num_bytes=3 * 4 * tokens * TOP_K)
        self.add("permute", f"top_k {TOP_K}", [(*x, slot_of, row_of, TOP_K) for x in some], num_bytes=2 * one)
        self.add(
            "unpermute",
            f"top_k {TOP_K}, weighted",
            [(*x, slot_of, row_of, tokens) for x in x],
            num_bytes=one + one // TOP_K,
            weights=weights,
        )
        self.add("unpermute_weights", f"top_k {TOP_K}", [(*some[0], *x, row_of, TOP_K) for x in x], num_bytes=one + one // TOP_K)
        for variant, kind in kinds.items():
            both = self.bytes_of("quantize_both", num_groups=EXPERTS, **kind) - one
            self.add(
                "permute_quantize_both", variant, [(*x, slot_of, TOP_K) for x in some], num_bytes=one + both, offs=ends, **kind
            )

    def bytes_of(self, op: str, num_groups: int | None = None, **cost) -> float:
        return sum(torch.ops.moxie._cost(op, list(self.shape), dtype=BF16, num_groups=num_groups or self.num_groups, **cost)[1:])

    def add_pad(self) -> list[Bench]:
        x = [(x, self.offs) for x in self.x()]
        padded = [moxie.pad_groups(*x) for x in x]
        self.add("pad_groups", "32 bf16", x, self.torchao.pad)
        self.add(
            "unpad_groups", "32 bf16", [(p, self.offs, starts, self.shape[0]) for p, starts, _ in padded], self.torchao.unpad
        )
        return self.benches

    def add_swizzle(self) -> list[Bench]:
        """Adds swizzle_scale of plain scales, and a copy of the same bytes to compare it with."""
        x = self.x()[0]
        for form, quantize in (("rowwise", moxie.quantize_rowwise), ("colwise", moxie.quantize_colwise)):
            scale = quantize(x, offs=self.offs)[1]
            offs = self.offs
            if form == "colwise":  # ends of the groups in columns of scales
                sizes = torch.diff(offs, prepend=offs.new_zeros(1))
                offs = ((sizes + 31) // 32).cumsum(0).to(torch.int32)
            count = math.ceil(ROTATE_BYTES / scale.nbytes)
            scales = [scale.clone() for _ in range(count)]
            # One op is as short as its launch, so a call runs it on all sets of buffers.
            calls = {
                "swizzle_scale": lambda scales=scales, offs=offs, form=form: [
                    moxie.swizzle_scale(scale, offs=offs, form=form) for scale in scales
                ],
                "copy": lambda scales=scales: [scale.clone() for scale in scales],
            }
            written = {"swizzle_scale": moxie.swizzle_scale(scale, offs=offs, form=form).nbytes, "copy": scale.nbytes}
            self.benches += [
                Bench(op, f"{form} scales", self.shape, self.num_groups, [call], scale.nbytes + written[op], parts=count)
                for op, call in calls.items()
                if self.wants(op, f"{form} scales")
            ]
        return self.benches

    def add_rules(self) -> list[Bench]:
        x = [(x,) for x in self.x()]
        for rule in ("floor", "rceil"):
            self.add("quantize_rowwise", f"1x32 {rule}", x, self.torchao.rowwise if rule == "rceil" else None, rule=rule)
            self.add("quantize_colwise", f"32x1 {rule}", x, self.torchao.colwise if rule == "rceil" else None, rule=rule)
        return self.benches

    def add_weights(self, x: list[tuple]) -> None:
        for block in ("32x32", "128x128"):
            blocks = {"rowwise_block": block, "colwise_block": block}
            self.add("quantize_both", f"{block} + {block} bf16", x, cost=blocks, **blocks)
            if self.device == "cuda":
                layout = blocks["scale_layout"] = "swizzled" if block == "32x32" else "quads"
                self.add("quantize_both", f"{block} + {block} bf16 {layout}", x, cost=blocks, **blocks)


# ---- how -----------------------------------------------------------------------------------------------------------------------


def measure(benches: list[Bench], repetitions: int, device: str) -> list[float]:
    """Times a plain copy and then each bench, once per repetition, so that a slow phase of the machine slows all of them alike.
    Returns the times of the copy.

    Each bench is called once before it is timed, on other buffers: otherwise it would pay for writing back what its predecessor
    left in the caches.
    """
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copy = []
    for i in harness.rounds(repetitions):
        target.copy_(source)
        copy.append(harness.seconds_of(lambda: target.copy_(source), device))
        for bench in benches:
            bench.calls[(i + 1) % len(bench.calls)]()
            bench.seconds.append(harness.seconds_of(bench.calls[i % len(bench.calls)], device))
            if bench.peer:
                bench.peer_seconds.append(harness.seconds_of(bench.peer, device))
    for bench in benches:
        del bench.seconds[: harness.WARM_UP], bench.peer_seconds[: harness.WARM_UP]
    return copy[harness.WARM_UP :]


# ---- results ----------------------------------------------------------------------------------------------------------------


def row_of(bench: Bench, copy_rate: float) -> dict:
    seconds = harness.spread([seconds / bench.parts for seconds in bench.seconds])
    rate = bench.num_bytes / seconds["median"]
    row = {
        "op": bench.op,
        "variant": bench.variant,
        "shape": list(bench.shape),
        "num_groups": bench.num_groups,
        "seconds": seconds,
        "bytes": bench.num_bytes,
        "gb_per_s": rate / 1e9,
        "of_copy": rate / copy_rate,
    }
    if bench.peer_seconds:
        row["torchao_seconds"] = harness.spread(bench.peer_seconds)
        row["times_torchao"] = row["torchao_seconds"]["median"] / seconds["median"]
    return row


def table(report: dict) -> str:
    lines = [("op", "variant", "shape", "groups", "ms", "GB/s", "of copy", "x torchao")]
    for row in report["rows"]:
        peer = f"{row['times_torchao']:.1f}" if "times_torchao" in row else "-"
        lines.append(
            (
                row["op"],
                row["variant"],
                "x".join(map(str, row["shape"])),
                str(row["num_groups"] or "-"),
                f"{row['seconds']['median'] * 1e3:.3f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['of_copy']:.0%}",
                peer,
            )
        )
    return "\n".join(
        [
            f"{harness.about(report)}; copy of 1 GiB: {report['copy']['gb_per_s']:.1f} GB/s; median of {report['repetitions']}",
            harness.text_table(lines, left=3),
        ]
    )


def parse_shape(text: str) -> tuple[int, ...]:
    sizes = harness.sizes_of(text)
    if len(sizes) not in (2, 3):
        raise argparse.ArgumentTypeError(f"a shape is RxC (tokens) or GxNxK (weights), got {text}")
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_options(parser)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, help="tokens RxC or weights GxNxK")
    parser.add_argument("--ops", nargs="+", default=[], help="only lines whose op or variant holds one of these words")
    parser.add_argument("--groups", type=int, default=8, help="groups of tokens, which end at random rows (default 8)")
    parser.add_argument("--half-empty", action="store_true", help="half of the groups empty, the others' sizes by Zipf's law")
    options = harness.parse_options(parser)
    if options.groups < 1:
        parser.error(f"--groups must be 1 or more, got {options.groups}")

    shapes = options.shapes or [parse_shape(text) for text in (QUICK_SHAPES if options.quick else SHAPES)[options.device]]
    torchao = Torchao()
    plan = lambda shape, groups: Plan(shape, groups, options, torchao)
    sets = [lambda shape=shape: plan(shape, options.groups).add_all() for shape in shapes]
    if options.device == "cuda" and not options.shapes and not options.quick:
        sets += [lambda: plan(SCALES_SHAPE, options.groups).add_swizzle()]
        sets += [lambda shape=shape, groups=groups: plan(shape, groups).add_pad() for shape, groups in PAD_GRID]
        sets += [lambda shape=shape: plan(shape, 0).add_rules() for shape in WEIGHT_GRID]
    report = harness.begin_report("bench/run.py", options) | {"copy": None, "rows": []}
    copies = []
    for make in sets:  # one shape at a time: the buffers of all shapes would not fit into memory together
        benches = make()
        if not benches:
            continue
        copies += (copy := measure(benches, options.repetitions, options.device))
        copy_rate = 2 * COPY_BYTES / harness.spread(copy)["median"]
        report["rows"] += [row_of(bench, copy_rate) for bench in benches]
        del benches
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if not report["rows"]:
        parser.error(f"no line holds one of: {' '.join(options.ops)}")
    copy = harness.spread(copies)
    report["copy"] = {"seconds": copy, "gb_per_s": 2 * COPY_BYTES / copy["median"] / 1e9}
    harness.write_report(report, options, "ops")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
