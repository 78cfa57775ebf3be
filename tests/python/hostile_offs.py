"""Calls everything that takes offs with invalid offs, for test_hostile_offs.py. As a program, on a GPU:

    hostile_offs.py RECIPE KIND [GROUPS..]      all calls of a recipe with one kind of offs

RECIPE may be "ops", for calls without a recipe, or "all".

The program fails at the first call that destroys the CUDA context, writes outside its buffers, or gives another result than the
same call with repaired offs. Under compute-sanitizer a few groups are enough (HACKING.md has the command).
"""

import sys
from collections.abc import Callable, Iterator

import torch

import conftest  # noqa: F401 (finds the package)
import moxie
from support import Buffer, as_numbers, as_tuple, assert_same_bytes, random_values

ROWS, N, K = 200, 32, 64
GROUPS = (1, 5, 33, 1023, 1024)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def _random(groups: int, low: int, high: int) -> list[int]:
    generator = torch.Generator().manual_seed(groups)
    return torch.randint(low, high, (groups,), generator=generator).tolist()


def _one_wrong(value: int) -> Callable[[int], list[int]]:
    """Returns a function that makes valid ends for a number of groups and then sets the middle one to `value`."""

    def ends(groups):
        good = sorted(_random(groups, 0, ROWS + 1))
        good[groups // 2] = value
        return good

    return ends


# Each kind maps a number of groups to invalid ends of groups over ROWS rows.
KINDS: dict[str, Callable[[int], list[int]]] = {
    "decreasing": lambda groups: [ROWS + 7, *sorted(_random(groups - 1, 0, ROWS), reverse=True)],
    "negative": lambda groups: [-1 - end for end in _random(groups, 0, ROWS)],
    "just beyond": lambda groups: [*sorted(_random(groups - 1, 0, ROWS)), ROWS + 1],
    "beyond": lambda groups: [10**6 + end for end in sorted(_random(groups, 0, ROWS))],
    "INT_MIN": _one_wrong(INT_MIN),
    "INT_MAX": _one_wrong(INT_MAX),
    "anything": lambda groups: [INT_MIN, *_random(groups - 1, INT_MIN, INT_MAX)],
}


def in_line(ends: list[int]) -> list[int]:
    """Returns the ends as a GPU repairs them: at most ROWS, and never below an earlier end (NUMERICS.md, section 7)."""
    result, most = [], 0
    for end in ends:
        most = max(most, min(end, ROWS))
        result.append(most)
    return result


def of_offs(op: Callable, *args, **kwargs) -> Callable:
    return lambda offs: op(*args, offs=offs, **kwargs)


class Calls:
    """Named calls, each a function that takes offs. All tensors lie between guard bytes. `good` are the valid offs with which the
    operands are quantized."""

    def __init__(self, device: str, good: torch.Tensor):
        self.good, self.groups, self.device, self.buffers = good, len(good), device, []
        self.x, self.dy = (self.own(random_values(ROWS, cols, device=device, seed=cols).clamp(-9, 9)) for cols in (K, N))
        self.h = self.own(random_values(ROWS, 2 * K, device=device, seed=9).clamp(-9, 9))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        self.buffers.append(Buffer(tensor))
        return self.buffers[-1].view

    def owned(self, tensors) -> list[torch.Tensor]:
        return [self.own(t) for t in tensors]

    def check_guards(self) -> None:
        for buffer in self.buffers:
            buffer.check()

    def weights(self, n: int, k: int, seed: int) -> torch.Tensor:
        return self.own(torch.randn(self.groups, n, k, generator=torch.Generator().manual_seed(seed)).bfloat16().to(self.device))

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        return self.own(torch.zeros(like.shape, device=self.device))

    def routed(self):
        """Routes 100 tokens to two experts each, which fills ROWS rows. Returns slot_of and row_of."""
        ids = torch.randint(0, 5, (ROWS // 2, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32).to(self.device)
        return moxie.route(ids, 5)[1:]

    # ---- ops ----

    def ops(self) -> Iterator[tuple[str, Callable]]:
        x, h, dy, good = self.x, self.h, self.dy, self.good
        tokens, (slot_of, _) = self.own(x[: ROWS // 2].clone()), self.routed()
        for layout in ("plain", "swizzled"):
            how = {"scale_layout": layout}
            yield f"quantize_rowwise {layout}", of_offs(moxie.quantize_rowwise, x, **how)
            for block in ("32x1", "128x32"):
                both = {"rowwise_block": "1x128", "colwise_block": block, **how}
                yield f"quantize_both {block} {layout}", of_offs(moxie.quantize_both, x, **both)
                yield f"swiglu_quantize_both {block} {layout}", of_offs(moxie.swiglu_quantize_both, h, **both)
                yield (
                    f"swiglu_backward_quantize_both {block} {layout}",
                    of_offs(moxie.swiglu_backward_quantize_both, x, h, **both),
                )
                yield (
                    f"permute_quantize_both {block} {layout}",
                    of_offs(moxie.permute_quantize_both, tokens, slot_of, 2, **both),
                )
                form = self.owned(moxie.quantize_colwise(x, offs=good, block=block, **how))
                yield (
                    f"dequantize_colwise {block} {layout}",
                    of_offs(moxie.dequantize_colwise, *form, ROWS, block=block, **how),
                )
            row = self.owned(moxie.quantize_rowwise(x, offs=good, **how))
            yield f"dequantize_rowwise {layout}", of_offs(moxie.dequantize_rowwise, *row, **how)
            yield f"requantize {layout}", of_offs(moxie.requantize, *row, from_layout=layout, **how)
        yield "quantize_per_row", lambda o: moxie.quantize_per_row(x, offs=o)
        yield "quantize_per_col", lambda o: moxie.quantize_per_col(x, offs=o)
        out = self.owned(moxie.quantize_both(x, offs=good))
        yield "quantize_both out", lambda o: [as_numbers(t).clone() for t in moxie.quantize_both(x, offs=o, out=tuple(out))]
        scale = self.own(moxie.quantize_rowwise(x)[1])
        yield "swizzle_scale", lambda o: moxie.swizzle_scale(scale, offs=o)
        swizzled = self.own(moxie.swizzle_scale(scale, offs=good))
        yield "unswizzle_scale", lambda o: moxie.unswizzle_scale(swizzled, *scale.shape, offs=o)
        yield "pad_groups", lambda o: moxie.pad_groups(x, o, 16)[:1]
        padded, starts, _ = self.owned(moxie.pad_groups(x, good, 16))
        yield "unpad_groups", lambda o: moxie.unpad_groups(padded, o, starts, ROWS)
        yield "sum_groups", lambda o: moxie.sum_groups(dy, o)
        yield "quantization_stats", lambda o: moxie.quantization_stats(x, o, part="x_t")

    # ---- products ----

    def products(self, recipe: str) -> Iterator[tuple[str, Callable]]:
        yield from self.passes(recipe)
        yield from self.nodes(recipe)

    def passes(self, recipe: str) -> Iterator[tuple[str, Callable]]:
        fields, w, how = moxie.Recipe.from_name(recipe), self.weights(N, K, 4), {"recipe": recipe}
        on_blackwell = self.device == "cuda" and torch.cuda.get_device_capability()[0] == 10
        bias = self.own(torch.randn(self.groups, N, device=self.device))

        def forms(t, colwise):
            if fields.scaling == "none":
                return (t, None, t, None)
            if fields.scaling == "row":
                made = (*moxie.quantize_per_row(t, offs=self.good), *moxie.quantize_per_col(t, offs=self.good))
            else:
                made = moxie.quantize_both(
                    t,
                    offs=self.good,
                    rowwise_block=fields.activations,
                    colwise_block=colwise,
                    rule=fields.rule,
                    scale_layout="swizzled" if on_blackwell else "plain",
                )
            return (*self.owned(made[:2]), *((t, None) if fields.wgrad_with_hp else self.owned(made[2:])))

        x, dy = forms(self.x, fields.wgrad_x), forms(self.dy, fields.wgrad_dy)
        w = (w, None, w, None) if fields.scaling == "none" else self.owned(moxie.quantize_weights(w, recipe=recipe))
        for dtype in (torch.bfloat16, torch.float32):
            yield f"grouped_fwd {dtype}", of_offs(moxie.grouped_fwd, *x[:2], *w[:2], bias=bias, dtype=dtype, **how)
            yield f"grouped_dgrad {dtype}", of_offs(moxie.grouped_dgrad, *dy[:2], *w[2:], dtype=dtype, **how)
            yield f"grouped_wgrad {dtype}", of_offs(moxie.grouped_wgrad, *dy[2:], *x[2:], ROWS, dtype=dtype, **how)
        grad = self.own(torch.zeros(self.groups, N, K, device=self.device))

        def add(o):
            moxie.grouped_wgrad_add_(grad.zero_(), *dy[2:], *x[2:], ROWS, o, **how)
            return grad.clone()

        yield "grouped_wgrad_add_", add

    def nodes(self, recipe: str) -> Iterator[tuple[str, Callable]]:
        w, w13, w2 = self.weights(N, K, 5), self.weights(2 * N, K, 6), self.weights(K, N, 7)
        bias = self.own(torch.randn(self.groups, N, device=self.device))
        slot_of, row_of = self.routed()

        def backward(y, dy, leaves):
            y.backward(dy.to(y.dtype))
            return (y.detach(), *(leaf.grad for leaf in leaves))

        for dtype in (torch.bfloat16, torch.float32):

            def linear(o, dtype=dtype):
                leaves = [t.detach().to(dtype).requires_grad_() for t in (self.x, w, bias)]
                y = moxie.grouped_mm(leaves[0], leaves[1], o, recipe=recipe, bias=leaves[2])
                return backward(y, self.dy, leaves)

            yield f"grouped_mm {dtype}", linear

        def into_main_grad(o):
            x, leaf, grad = self.x.detach().requires_grad_(), w.detach().requires_grad_(), self.zeros(w)
            moxie.grouped_mm(x, leaf, o, recipe=recipe, main_grad=grad).backward(self.dy)
            return x.grad, grad

        yield "grouped_mm main_grad", into_main_grad

        def mlp(o, x, **kwargs):
            leaves = [t.detach().requires_grad_() for t in (x, w13, w2)]
            y = moxie.expert_mlp(*leaves, o, recipe=recipe, **kwargs)
            return backward(y, self.x[: len(y)], leaves)

        yield "expert_mlp", lambda o: mlp(o, self.x)
        yield "expert_mlp permuted", lambda o: mlp(o, self.x[: ROWS // 2], slot_of=slot_of, row_of=row_of, top_k=2)

        for collects in (False, True):

            def layer(o, collects=collects):
                experts = moxie.nn.GroupedExperts(K, N, self.groups, recipe=recipe).to(self.device)
                experts.collect_stats = collects
                with torch.no_grad():
                    experts.w13.copy_(w13)
                    experts.w2.copy_(w2)
                x = self.x.detach().requires_grad_()
                y = experts(x, o)
                return backward(y, self.x, (x, experts.w13, experts.w2))

            yield f"GroupedExperts, stats {collects}", layer

    def all(self, recipe: str) -> Iterator[tuple[str, Callable]]:
        return self.ops() if recipe == "ops" else self.products(recipe)


def offs_of(ends: list[int], device: str) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def main(recipe: str, kind: str, *groups: str) -> None:
    if recipe == "all":
        for each in ("ops", *moxie.recipe_names()):
            print(each)
            main(each, kind, *groups)
        return
    for count in map(int, groups or GROUPS):
        ends = KINDS[kind](count)
        good = offs_of(in_line(ends), "cuda")
        calls = Calls("cuda", good)
        for name, call in calls.all(recipe):
            print(f"{count} groups: {name}", flush=True)
            hostile = Buffer(offs_of(ends, "cuda"))
            calls.buffers.append(hostile)
            actual = as_tuple(call(hostile.view))
            torch.cuda.synchronize()
            assert_same_bytes(actual, as_tuple(call(good)), name)
            calls.check_guards()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
