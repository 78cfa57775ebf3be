"""Cases of test_expert_parallel.py: the bytes that a process group carries are those of docs/EXPERT_PARALLEL.md."""

import dataclasses

import torch
import torch.distributed as dist

import moxie.nn
from expert_parallel_layers import DIM, EXPERTS, TOKENS, WIRES, cases_of, inputs, layers, step, summed

NAMES, case = cases_of(globals())


class Counted(dist.ProcessGroup):
    """Forwards all-to-alls to `inner` and appends to `sent` how many bytes each of them sends to each rank."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.sent = inner, []

    def getBackendName(self):
        return "counted"

    def _note(self, tensor, splits):
        row = tensor.numel() // max(tensor.shape[0], 1) * tensor.element_size() if tensor.shape[0] else 0
        self.sent.append([count * row for count in splits])

    def alltoall_base(self, output, tensor, output_splits, input_splits, options):
        self._note(tensor, input_splits)
        return self.inner.alltoall_base(output, tensor, output_splits, input_splits, options)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, options):
        self._note(tensor, input_splits)
        return self.inner.all_to_all_single(output, tensor, output_splits, input_splits, options)


def count_bytes(group, layer, x, dy):
    """Runs a step. Returns the bytes sent to each rank in each exchange: counts of rows, x, y, dy and dx."""
    counted = Counted(group)
    name = f"counted.{len(COUNTED)}"
    COUNTED.append(counted)
    torch._C._distributed_c10d._register_process_group(name, counted)
    member = layer.experts.member
    layer.experts.member = dataclasses.replace(member, name=name)
    step(layer, x, dy)
    layer.experts.member = member
    torch._C._distributed_c10d._unregister_process_group(name)
    assert counted.sent[0] == [4] * group.size(), "the number of experts"
    return counted.sent[1:]


COUNTED: list = []


def round16(count: int) -> int:
    return -(-count // 16) * 16


def expected_bytes(ids, size, dim, block, element, experts):
    """Computes the bytes that docs/EXPERT_PARALLEL.md predicts for one rank, whose tokens go to the experts `ids` [T, k]."""
    ranks_of = ids.long() // (experts // size)
    tokens = [int((ranks_of == rank).any(1).sum()) for rank in range(size)]
    pairs = [int((ranks_of == rank).sum()) for rank in range(size)]
    row = round16(dim + -(-dim // block)) if block else round16(dim * element)
    back = round16(dim * element)
    counts = [4 * (experts // size + 3)] * size
    x = [t * row + p * 8 for t, p in zip(tokens, pairs)]
    return counts, x, [p * back for p in pairs], [t * row for t in tokens], [p * (back + 4) for p in pairs], tokens


@case
def bytes_on_the_wire_are_those_of_the_formula(rank, size):
    for recipe, wires in WIRES.items():
        block = {"mxfp8_rceil": 32, "mxfp8_rceil_128": 128}.get(recipe, 0)
        for wire in wires:
            for dtype in (torch.bfloat16, torch.float32):
                _, parallel = layers(size, dist.group.WORLD, dtype=dtype, recipe=recipe, wire=wire)
                torch.manual_seed(20 + rank)
                x, dy = inputs("normal", TOKENS, dtype), inputs("normal", TOKENS, dtype)
                sent = count_bytes(dist.group.WORLD, parallel, x, dy)
                ids = parallel.router(x).ids
                counts, of_x, _, of_dy, _, _ = expected_bytes(
                    ids, size, DIM, block if wire == "fp8" else 0, dtype.itemsize, EXPERTS
                )
                assert sent[0] == counts and sent[1] == of_x and sent[3] == of_dy, (recipe, wire, sent)
                # y (2) and dx (4) travel back from the experts' ranks, so what this rank gets is in the other ranks' lists.
                for leg, of in ((2, 2), (4, 4)):
                    everyone = [None] * size
                    dist.all_gather_object(everyone, sent[leg])
                    back = expected_bytes(ids, size, DIM, 0, dtype.itemsize, EXPERTS)[of]
                    assert [other[rank] for other in everyone] == back, (recipe, wire, leg)


@case
def a_wide_layer_sends_as_little_as_it_should(rank, size):
    if size != 4:
        return
    dim, experts, tokens = 7168, 256, 24
    for top_k, most in ((1, 0.76), (8, 0.62)):
        torch.manual_seed(30)
        layer = moxie.nn.MoE(dim, 32, experts, top_k, recipe="mxfp8_rceil", dtype=torch.bfloat16, ep_group=dist.group.WORLD)
        layer.experts.requires_grad_(False)
        torch.manual_seed(31 + rank)
        x, dy = torch.randn(tokens, dim).bfloat16(), torch.randn(tokens, dim).bfloat16()
        sent = count_bytes(dist.group.WORLD, layer, x, dy)
        ids = layer.router(x).ids
        *_, unique = expected_bytes(ids, size, dim, 32, 2, experts)
        assert sum(sent[3]) == sum(unique) * 7392, "rows are unique pairs of token and rank"
        assert 7392 / (2 * dim) <= 0.525
        total = summed(torch.tensor(float(sum(sum(leg) for leg in sent[1:])))).item()
        plain = 4 * size * tokens * top_k * 2 * dim
        print(f"top {top_k}: {total / plain:.4f} of bf16's bytes", flush=True)
        assert total / plain <= most, (top_k, total / plain)
