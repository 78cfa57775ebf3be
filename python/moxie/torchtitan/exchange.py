"""Exchanges tokens for experts that are TorchTitan's own: tokens go to the ranks of their experts, and rows come back.

Where the experts are Moxie's, one node exchanges and multiplies (`moxie.nn.MoE` over a group has the same one), and nothing here
is called. The messages here are of the same form: a token goes to a rank once, in FP8 or as it is; each pair of token and expert
adds the row of its token in the message and its weight; results come back as they are. docs/EXPERT_PARALLEL.md has the table.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from moxie.moe import route, unpermute, unpermute_weights
from moxie.ops import Block, Rule, dequantize_rowwise, quantize_rowwise
from moxie.recipe import Recipe

OP = "moxie.torchtitan.dispatch"
_ROW_ALIGNMENT = 16  # bytes to which rows are padded, as in moxie/core/layout/wire.h
_PAIR_BYTES = 8  # an int32 row in the message, and an f32 weight


@dataclass(frozen=True)
class Wire:
    """The form in which x and dy are sent: quantized in blocks of a row, or unquantized (block is None)."""

    block: Block | None = None
    rule: Rule = "rceil"

    @staticmethod
    def of(recipe: str, wire: str) -> "Wire":
        made = Recipe.from_name(recipe)
        return Wire(made.activations, made.rule) if wire == "fp8" else Wire()

    def to_bytes(self, x: Tensor) -> Tensor:
        """Returns x [T, D] as rows of bytes: elements, scales, and padding."""
        if self.block:
            parts = [part.view(torch.uint8) for part in quantize_rowwise(x, block=self.block, rule=self.rule)]
        else:
            parts = [x.contiguous().view(torch.uint8)]
        padding = -sum(part.shape[1] for part in parts) % _ROW_ALIGNMENT
        return torch.cat([*parts, parts[0].new_zeros(len(x), padding)], dim=1)

    def from_bytes(self, rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """The inverse of to_bytes. Quantized values are decoded, as a product would decode them."""
        if not self.block:
            return rows[:, : dim * dtype.itemsize].contiguous().view(dtype)
        scales = -(-dim // int(self.block.partition("x")[2]))
        qdata, scale = (part.contiguous() for part in rows[:, : dim + scales].split([dim, scales], dim=1))
        return dequantize_rowwise(
            qdata.view(torch.float8_e4m3fn),
            scale.view(torch.float8_e8m0fnu),
            block=self.block,
            dtype=dtype,
        )


def all_to_all(group: dist.ProcessGroup, x: Tensor, outgoing: list[int], incoming: list[int], what: str) -> Tensor:
    try:
        return collectives.wait_tensor(collectives.all_to_all_single(x, incoming, outgoing, group))
    except RuntimeError as error:
        raise RuntimeError(
            f"{OP}: the exchange of {what} failed on rank {group.rank()} of the {group.size()} ranks of group "
            f"'{group.group_name}' ({error})"
        ) from error


@dataclass
class Traffic:
    """How many tokens, and how many pairs of token and expert, this rank sends to each rank or gets from it."""

    tokens: list[int]
    pairs: list[int]  # pairs of token and expert


@dataclass
class Places:
    """Where the rows of one call lie on this rank, as the sender of its tokens and as the holder of its experts."""

    group: dist.ProcessGroup
    num_tokens: int
    outgoing: Traffic
    incoming: Traffic
    slot_of: Tensor  # the slot of each of this rank's pairs, in order of expert and token
    row_of: Tensor
    token_of: Tensor  # the tokens that are sent, in order of the receiving rank
    row_in_message: Tensor  # for each pair that is sent, the row of its token in the message
    arrival_of: Tensor  # for each row of the local experts, the number of its pair among those that arrived
    row_of_arrival: Tensor
    counts: Tensor  # rows of each local expert


def exchange_counts(group: dist.ProcessGroup, ids: Tensor, num_experts: int) -> Places:
    """Works out from ids [T, k], the experts of this rank's tokens, where rows go, and exchanges counts. The host needs the sizes
    of messages, so one copy of counts waits for the device."""
    world, (num_tokens, top_k) = group.size(), ids.shape
    local = num_experts // world
    offs, slot_of, row_of = route(ids.int(), num_experts)
    rank_of = ids.long() // local
    goes = torch.zeros(num_tokens, world, dtype=torch.bool, device=ids.device).scatter_(1, rank_of, True).t()
    pairs = torch.diff(offs, prepend=offs.new_zeros(1)).view(world, local)
    sent = torch.cat([pairs, goes.sum(1, keepdim=True, dtype=torch.int32)], dim=1)
    ones = [1] * world
    got = all_to_all(group, sent, ones, ones, "counts")
    host = torch.stack([sent, got]).cpu()
    outgoing, incoming = (Traffic(one[:, local].tolist(), one[:, :local].sum(1).tolist()) for one in host)

    token_of = torch.nonzero_static(goes, size=sum(outgoing.tokens))[:, 1]
    row = goes.cumsum(1) - 1
    slots = slot_of.long()
    row_in_message = row[rank_of.flatten()[slots], slots // top_k]

    # Pairs arrive in order of (rank, expert), while the experts' rows are in order of (expert, rank).
    by_rank = got[:, :local].long()
    arrival = (by_rank.flatten().cumsum(0) - by_rank.flatten()).view(world, local).t().flatten()
    lengths = by_rank.t().flatten()
    total = sum(incoming.pairs)
    rows = torch.arange(total, device=ids.device)
    arrival_of = torch.repeat_interleave(arrival - (lengths.cumsum(0) - lengths), lengths, output_size=total) + rows
    row_of_arrival = torch.empty_like(rows).scatter_(0, arrival_of, rows)
    return Places(
        group, num_tokens, outgoing, incoming, slot_of, row_of, token_of, row_in_message, arrival_of, row_of_arrival,
        by_rank.sum(0),
    )  # fmt: skip


def _send_tokens(places: Places, rows: Tensor, pairs: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Sends one message to each rank: rows uint8 [tokens that are sent, width], then pairs uint8 [pairs, width]. Returns the rows
    and pairs that arrive."""
    out, into, widths = places.outgoing, places.incoming, (rows.shape[1], pairs.shape[1])

    def sizes(traffic: Traffic) -> list[int]:
        return [size for both in zip(traffic.tokens, traffic.pairs) for size in (both[0] * widths[0], both[1] * widths[1])]

    of_rank = zip(rows.split(out.tokens), pairs.split(out.pairs))
    message = torch.cat([part.flatten() for both in of_rank for part in both])
    to_each, from_each = ([sum(both) for both in zip(flat[::2], flat[1::2])] for flat in (sizes(out), sizes(into)))
    got = all_to_all(places.group, message, to_each, from_each, what).split(sizes(into))
    return torch.cat(got[::2]).view(-1, widths[0]), torch.cat(got[1::2]).view(sum(into.pairs), widths[1])


def _send_rows_back(places: Places, rows: Tensor, what: str) -> Tensor:
    """Sends the rows of the local experts back to their tokens' ranks. Returns the rows of this rank's pairs, in the order of
    slot_of."""
    in_order = rows.index_select(0, places.row_of_arrival)
    as_bytes = in_order.contiguous().view(torch.uint8)
    got = all_to_all(places.group, as_bytes, places.incoming.pairs, places.outgoing.pairs, what)
    return got.view(rows.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, places: Places, wire: Wire):
        ctx.places = places
        by_row = weights.float().flatten()[places.slot_of.long()]
        pairs = torch.stack([places.row_in_message.int(), by_row.view(torch.int32)], dim=1).view(torch.uint8)
        assert pairs.shape[1] == _PAIR_BYTES
        tokens, got = _send_tokens(places, wire.to_bytes(x)[places.token_of], pairs, "x")
        row_in_message, row_weights = got.view(torch.int32)[places.arrival_of].unbind(1)
        into = places.incoming
        first = torch.tensor([sum(into.tokens[:rank]) for rank in range(len(into.tokens))], device=x.device)
        of_rank = torch.repeat_interleave(torch.tensor(into.pairs, device=x.device), output_size=sum(into.pairs))
        row_token = row_in_message + first[of_rank][places.arrival_of]
        rows = wire.from_bytes(tokens, x.shape[1], x.dtype)[row_token]
        row_weights = row_weights.contiguous().view(torch.float32)
        ctx.mark_non_differentiable(row_weights, row_token)
        return rows, row_weights, row_token

    @staticmethod
    def backward(ctx, drows: Tensor, *_):
        places: Places = ctx.places
        back = _send_rows_back(places, drows, "dx")
        return unpermute(back, places.slot_of, places.row_of, places.num_tokens), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, row_weights: Tensor, row_token: Tensor, places: Places, wire: Wire):
        back = _send_rows_back(places, rows, "y")
        ctx.places, ctx.wire, ctx.rows_dtype, ctx.top_k = places, wire, rows.dtype, weights.shape[1]
        ctx.save_for_backward(back, row_weights, row_token)
        return unpermute(back, places.slot_of, places.row_of, places.num_tokens, weights=weights.float())

    @staticmethod
    def backward(ctx, dy: Tensor):
        places: Places = ctx.places
        back, row_weights, row_token = ctx.saved_tensors
        no_pairs = dy.new_empty(sum(places.outgoing.pairs), 0, dtype=torch.uint8)
        tokens, _ = _send_tokens(places, ctx.wire.to_bytes(dy)[places.token_of], no_pairs, "dy")
        of_rows = ctx.wire.from_bytes(tokens, dy.shape[1], dy.dtype)[row_token]
        drows = (of_rows * row_weights.unsqueeze(1)).to(ctx.rows_dtype)
        dweights = None
        if ctx.needs_input_grad[1]:
            dweights = unpermute_weights(dy, back, places.row_of, ctx.top_k)
        return drows, dweights, None, None, None, None


@dataclass
class Sent:
    """What combine() needs to know about the dispatch."""

    places: Places
    wire: Wire
    weights: Tensor
    row_weights: Tensor
    row_token: Tensor


def dispatch(
    group: dist.ProcessGroup, x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, wire: Wire
) -> tuple[Tensor, Sent]:
    """Sends tokens x [T, D] to the ranks of their experts. Returns the rows [R, D] of the local experts, in order of expert, rank
    and token. Differentiable in x."""
    places = exchange_counts(group, ids, num_experts)
    rows, row_weights, row_token = _Dispatch.apply(x, weights.detach(), places, wire)
    return rows, Sent(places, wire, weights, row_weights, row_token)


def combine(rows: Tensor, sent: Sent) -> Tensor:
    """Sends rows back to their tokens' ranks. Returns the weighted sum of each token's results, [T, D]. Differentiable in rows
    and in the weights."""
    return _Combine.apply(rows, sent.weights, sent.row_weights, sent.row_token, sent.places, sent.wire)
