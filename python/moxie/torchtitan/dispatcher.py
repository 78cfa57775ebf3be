"""A token dispatcher for TorchTitan 0.3 that exchanges tokens as Moxie's own layers do.

TorchTitan calls dispatch, then the experts, then combine. Where the experts are Moxie's fused ones, dispatch hands them the
tokens with their route, and one node of autograd does all three; elsewhere `exchange.py` moves rows around TorchTitan's experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from moxie.expert_parallel import Wire, check_wire, default_wire
from moxie.gemm import DEFAULT_RECIPE, expert_mlp
from moxie.moe import route
from moxie.torchtitan import exchange


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens [T, D] with the route to their experts, which Moxie's fused experts take in place of permuted rows."""

    x: Tensor
    weights: Tensor  # f32 [T, k]
    offs: Tensor  # of all experts
    slot_of: Tensor
    row_of: Tensor
    group: str  # the name of the group that holds the experts; "" if this rank holds them all
    wire: Wire | None

    def through(self, w13: Tensor, w2: Tensor, recipe: str) -> Tensor:
        """Runs the experts on the tokens. Returns the weighted sum of each token's results, [T, D], in the dtype of x."""
        if not self.group:
            y = expert_mlp(
                self.x.bfloat16(),
                w13,
                w2,
                self.offs,
                recipe=recipe,
                slot_of=self.slot_of,
                row_of=self.row_of,
                top_k=self.weights.shape[1],
                weights=self.weights,
            )
        else:
            wire = self.wire or default_wire(recipe)
            y = torch.ops.moxie.expert_mlp.parallel(
                self.x,
                w13,
                w2,
                self.weights,
                self.offs,
                self.slot_of,
                self.row_of,
                self.group,
                recipe=recipe,
                wire=wire,
                x_dtype=torch.bfloat16,
            )
        return y.type_as(self.x)


class MoxieTokenDispatcher(AllToAllTokenDispatcher):
    """Sends x and dy in FP8 and results unquantized. A token goes to each rank at most once, in one message per rank, and nothing
    is padded. Each expert gets its rows in order of rank and token."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        wire: Wire | None = None  # None: what suits the recipe
        recipe: str = DEFAULT_RECIPE  # how x and dy are quantized on their way to experts that are not Moxie's
        experts_take_tokens: bool = False  # whether the experts are Moxie's fused ones

    def __init__(self, config: Config):
        super().__init__(config)
        self.wire, self.experts_take_tokens = config.wire, config.experts_take_tokens
        self.own_wire = exchange.Wire.of(config.recipe, config.wire or default_wire(config.recipe))

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E) -> tuple[Any, Tensor, Any]:
        is_split = self.ep_mesh is not None
        if is_split and torch.compiler.is_compiling():
            raise ValueError(
                f"{exchange.OP}: sizes of messages depend on the routing, so the exchange cannot be part of a compiled graph; "
                "train without --compile.enable, or without this override"
            )
        if self.experts_take_tokens:
            places = route(topk_expert_ids_TK.int(), self.num_experts)
            group = self.ep_mesh.get_group().group_name if is_split else ""
            tokens = RoutedTokens(x_TD, topk_scores_TK.float(), *places, group, self.wire)
            return tokens, num_local_tokens_per_expert_E, tokens
        if not is_split:
            return super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        rows, sent = exchange.dispatch(
            self.ep_mesh.get_group(), x_TD, topk_scores_TK, topk_expert_ids_TK, self.num_experts, self.own_wire
        )
        return rows, sent.places.counts, sent

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        if isinstance(metadata, RoutedTokens):
            return routed_output_RD  # the fused experts have added up each token's results
        if isinstance(metadata, exchange.Sent):
            return exchange.combine(routed_output_RD, metadata).type_as(x_TD)
        return super().combine(routed_output_RD, metadata, x_TD)


def moxie_dispatcher(config: LocalTokenDispatcher.Config, recipe: str, wire: Wire | None) -> MoxieTokenDispatcher.Config:
    if wire not in (None, "fp8", "unquantized"):
        raise ValueError(f"{exchange.OP}: wire must be fp8 or unquantized, got {wire!r}")
    check_wire(wire, recipe)
    return derive(config, MoxieTokenDispatcher.Config, recipe=recipe, wire=wire)
