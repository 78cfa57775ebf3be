"""Expert parallelism: the experts of `moxie.nn.MoE` split over the ranks of a process group (docs/EXPERT_PARALLEL.md).

Every rank holds its tokens and its share of the experts, in order of rank. Tokens travel to their experts and results back. All
ranks exchange at the same places of the program, in backward as well.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moxie import gemm
from moxie.distributed.agree import agree
from moxie.dtensors import any_dtensor
from moxie.nn import GroupedExperts, Router, Uncast, _tensors
from moxie.recipe import AnyRecipe, Recipe
from moxie.symmetric import Place, Shared, Sizes, Symmetric, limits_of, place_of

_ops = torch.ops.moxie

Wire = Literal["fp8", "unquantized"]
Engine = Literal["c10d", "symmetric"] | Symmetric  # what carries the tokens


@dataclasses.dataclass(frozen=True)
class Member:
    """This rank's place in a process group. It holds the group's name and not the group, so that layers can be copied and
    pickled."""

    name: str
    rank: int
    size: int

    @property
    def group(self) -> dist.ProcessGroup:
        name: Any = self.name  # Any, because some versions of torch have a type of their own for group names
        return dist.distributed_c10d._resolve_process_group(name)

    def refuse_tokens_of_group(self, x: Any) -> None:
        """Raises if x is a DTensor over the group: every rank would send the tokens of all ranks, and gradients would count each
        token several times."""
        mesh = x.device_mesh
        if any(mesh.get_group(dim).group_name == self.name for dim in range(mesh.ndim)):
            raise ValueError(
                f"MoE: x must hold this rank's tokens as a plain tensor, got a DTensor over the ep_group '{self.name}'; give "
                "x.to_local() of one that is sharded by tokens"
            )


def member_of(group: Any) -> Member:
    """Returns this rank's place in a process group, which may be given as a device mesh of one dimension."""
    if not dist.is_initialized():
        raise ValueError("MoE: ep_group needs torch.distributed, which is not initialized (init_process_group)")
    given = group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(f"MoE: ep_group must be one dimension of a mesh, such as mesh['ep'], got {group.ndim} dimensions")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"MoE: ep_group must be a ProcessGroup or a DeviceMesh, got {type(given).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("MoE: ep_group must contain this rank")
    return Member(group.group_name, rank, dist.get_world_size(group))


def join(group: Any, settings: Mapping[str, Any]) -> Member:
    """Checks, when a layer is made, that its settings are the same on all ranks and that its experts can be split among them.
    Every rank must call it; if one rank raises, all do."""
    member = member_of(group)

    def describe() -> Mapping[str, Any]:
        experts, wire = settings["num_experts"], settings["wire"]
        if experts % member.size != 0:
            raise ValueError(
                f"MoE: num_experts must be a multiple of the {member.size} ranks of group '{member.name}', got {experts}"
            )
        if wire not in (None, "fp8", "unquantized"):
            raise ValueError(f"MoE: wire must be fp8 or unquantized, got {wire!r}")
        check_wire(wire, settings["recipe"])
        parse_engine(settings.get("engine"))
        if settings.get("collect_stats", False):
            raise ValueError("MoE: collect_stats must be False over a group, got True")
        dtype = settings.get("dtype") or torch.get_default_dtype()
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"MoE: dtype must be torch.bfloat16 or torch.float32 over a group, got {dtype}")
        return {name: value for name, value in settings.items() if name != "device"}

    agree(f"MoE over group '{member.name}'", member.group, describe)
    return member


def parse_engine(engine: Engine | None) -> Symmetric | None:
    """The settings of the symmetric engine, or None for c10d, the default."""
    if engine is None or engine == "c10d":
        return None
    if engine == "symmetric":
        return Symmetric()
    if not isinstance(engine, Symmetric):
        raise ValueError(f"MoE: engine must be c10d, symmetric or a Symmetric, got {engine!r}")
    return engine


def check_wire(wire: Wire | None, recipe: AnyRecipe) -> None:
    if wire == "fp8" and not _fits_fp8(recipe):
        raise ValueError(f"MoE: wire fp8 takes recipes that quantize all three passes in blocks of a row, got {recipe}")


def _fits_fp8(recipe: AnyRecipe) -> bool:
    """Whether the recipe quantizes x and dy in blocks along a row for all three passes, so that they can be sent in FP8."""
    if str(recipe).partition(":")[0] == "identity":
        return False
    made = Recipe.from_name(str(recipe))
    return made.scaling == "block" and not made.wgrad_with_hp and made.activations.startswith("1x")


def default_wire(recipe: AnyRecipe) -> Wire:
    """Returns the wire to use if the caller names none: FP8 if the recipe quantizes rows in blocks by the rule rceil or ceil.
    wgrad's operands are requantized from the FP8 tokens; under floor and even that clips values a second time, which lowers the
    accuracy of dw."""
    return "fp8" if _fits_fp8(recipe) and Recipe.from_name(str(recipe)).rule in ("rceil", "ceil") else "unquantized"


class ParallelExperts(GroupedExperts):
    """GroupedExperts split over the ranks of a group: each rank holds num_experts / ranks of them. For a given seed, the weights
    are those of GroupedExperts in one process. forward takes this rank's tokens, their route to all experts, and the routing
    weights."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        member: Member,
        wire: Wire | None = None,
        engine: Engine | None = None,
        recipe: AnyRecipe = gemm.DEFAULT_RECIPE,
        **options: Any,
    ):
        self.member, self._wire_asked, self.num_experts = member, wire, num_experts
        self.symmetric, self._place = parse_engine(engine), None
        self._captured: list[Shared] = []
        super().__init__(dim, hidden_dim, num_experts // member.size, recipe=recipe, **options)

    symmetric: Symmetric | None = None  # the symmetric engine; None is c10d
    _place: Place | None = None  # in shared memory, from the first forward on

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_place": None, "_captured": []}  # a copy finds a place of its own

    def set_recipe_(self, recipe: AnyRecipe, *, weight_cache: bool = False) -> None:
        check_wire(self._wire_asked, recipe)
        super().set_recipe_(recipe, weight_cache=weight_cache)
        self.wire: Wire = self._wire_asked or default_wire(recipe)  # how x and dy travel

    def reset_parameters(self) -> None:
        # Draws the weights of all experts and keeps this rank's, so that a seed gives the same model at any number of ranks.
        first, local = self.member.rank * self.w13.shape[0], self.w13.shape[0]
        with torch.no_grad():
            for weight, bias in ((self.w13, self.b13), (self.w2, self.b2)):
                bound = 1 / math.sqrt(self._as_taken(weight).shape[-1])
                for parameter in (weight,) if bias is None else (weight, bias):
                    own, before = _shard_of_experts(parameter)
                    drawn = torch.empty_like(own[0]) if len(own) else own.new_empty(own.shape[1:])
                    for expert in range(0 if parameter.is_meta else self.num_experts):
                        nn.init.uniform_(drawn, -bound, bound)
                        at = expert - first - before
                        if first <= expert < first + local and 0 <= at < len(own):
                            own[at].copy_(drawn)
        self.reset_stats_()

    def forward(
        self,
        x: Tensor,
        offs: Tensor | None = None,
        *,
        slot_of: Tensor | None = None,
        row_of: Tensor | None = None,
        top_k: int = 1,
        weights: Tensor | Uncast | None = None,
    ) -> Tensor:
        weights = weights.tensor if isinstance(weights, Uncast) else weights
        if offs is None or slot_of is None or row_of is None or weights is None:
            raise ValueError("ParallelExperts: experts of a group take tokens with offs, slot_of, row_of and weights")
        if self.collect_stats:
            raise ValueError("ParallelExperts: collect_stats must be off over a group")
        # A compiled graph cannot contain the exchange: one graph ends before it and another begins after it.
        call = torch.compiler.disable(_exchange) if torch.compiler.is_compiling() else _exchange
        return call(self, x, weights, offs, slot_of, row_of)

    def extra_repr(self) -> str:
        ranks = f"{self.num_experts} experts over {self.member.size} ranks of group {self.member.name!r}"
        return f"{ranks}, wire {self.wire}, engine {'c10d' if self.symmetric is None else self.symmetric}"

    def place(self, x: Tensor, top_k: int) -> Place:
        """Returns this layer's place in shared memory. The first call makes it, on all ranks together."""
        assert self.symmetric is not None
        dim = self._as_taken(self.w13).shape[-1]
        sizes = Sizes(self.member.size, self.num_experts, dim, top_k, self.recipe, self.wire, x.dtype, self.b2 is not None)
        alone = self.member.size == 1 and self.symmetric.max_rows is None and self.symmetric.max_tokens is None
        # Without asking the other ranks if there is room: where only this rank has changed, GPUs find that calls differ.
        if self._place is not None and self._place.sizes != sizes and self._place.holds(sizes):
            self._place = dataclasses.replace(self._place, sizes=sizes)
        if self._place is None or self._place.sizes != sizes or (alone and x.shape[0] > self._place.tokens):
            self._place = place_of(self.member, self.symmetric, sizes, x)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.append(self._place.shared)  # a graph goes on using the memory that it was captured with
        if alone:  # one rank knows its rows
            return dataclasses.replace(self._place, limits=limits_of(self.symmetric, sizes, x.shape[0]))
        return self._place

    def check(self) -> None:
        """Waits for the device, and raises if an exchange of the symmetric engine has failed."""
        if self._place is None or self.symmetric is None:
            return
        if self._place.shared.memory.is_cuda:
            torch.cuda.synchronize(self._place.shared.memory.device)
        member = self.member
        _ops._exchange_check(self._place.shared.status, member.rank, member.size, self.symmetric.timeout_ms, member.name)


def _shard_of_experts(weight: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor whose experts can be written one by one, and how many of the weight's experts come before it. If FSDP2
    shards the experts over dim 0, this is the local shard, because indexing the DTensor would give copies."""
    if not any_dtensor(weight):
        return weight, 0
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(weight, DTensor)
    if not any(isinstance(placement, Shard) and placement.dim == 0 for placement in weight.placements):
        return weight, 0
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    if tuple(shape[1:]) != tuple(weight.shape[1:]):
        raise ValueError(
            f"ParallelExperts.reset_parameters: experts must be sharded over dim 0 alone, or not over it, got {weight.placements}"
        )
    return weight.to_local(), offset[0]


def _exchange(experts: ParallelExperts, x: Tensor, weights: Tensor, offs: Tensor, slot_of: Tensor, row_of: Tensor) -> Tensor:
    def exchange(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        return _exchange_with(experts, x, w13, w2, weights, offs, slot_of, row_of)

    if not any_dtensor(experts.w13, experts.w2):
        return exchange(x, experts._as_taken(experts.w13), experts._as_taken(experts.w2), weights)
    if experts.transposed or experts.w13_layout != "concatenated" or experts.b13 is not None or experts.main_grad:
        raise ValueError(
            "ParallelExperts: experts whose weights are DTensors must be [out, in], concatenated, without bias and main_grad"
        )
    from moxie.distributed import products

    return products.expert_mlp_over_group(x, experts.w13, experts.w2, weights, recipe=experts.recipe, exchange=exchange)


def _exchange_with(
    experts: ParallelExperts, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, offs: Tensor, slot_of: Tensor, row_of: Tensor
) -> Tensor:
    options: dict[str, Any] = {
        "recipe": experts.recipe,
        "wire": experts.wire,
        "quantized_w13": _tensors(gemm.live_cache(experts.cache13, experts.w13)),
        "quantized_w2": _tensors(gemm.live_cache(experts.cache2, experts.w2)),
        "main_grad13": experts._main_grad("w13"),
        "main_grad2": experts._main_grad("w2"),
        "keep": experts.keep,
        "activation": experts.activation,
        "b13": experts.b13,
        "b2": experts.b2,
        "w13_layout": experts.w13_layout,
    }
    route = (x, w13, w2, weights, offs, slot_of, row_of)
    if experts.symmetric is None:
        return _ops.expert_mlp.parallel(*route, experts.member.name, **options)
    member, place = experts.member, experts.place(x, weights.shape[1])
    shared, limits = place.shared, list(place.limits)
    return _ops.expert_mlp.symmetric(
        *route,
        shared.memory,
        shared.status,
        shared.peers,
        shared.capacity,
        limits,
        member.rank,
        experts.symmetric.timeout_ms,
        member.name,
        **options,
    )


# ---- the router ---------------------------------------------------------------------------------------------------------------


def sum_over_ranks(member: Member, x: Tensor, what: str) -> Tensor:
    """Returns the sum of x over the ranks of the group. No gradient flows through it."""
    return _ops._sum_over_group(x.detach(), member.name, what)


def router_loss(router: Router, member: Member, logits: Tensor, counts: Tensor) -> Tensor:
    """Returns the router's losses over the tokens of all ranks: one number, the same on every rank.

    Its gradient on a rank is that of the rank's own logits, so gradients of the gate that are summed over ranks are those of one
    process with all tokens.
    """
    own: list[Tensor] = []  # in f64, so that the loss does not depend on how tokens are spread over the ranks
    if router.balance == "loss":
        scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
        probability = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        own.append(probability.sum(0, dtype=torch.float64))
    if router.z_loss_weight != 0:
        own.append(logits.logsumexp(-1).square().sum(dtype=torch.float64).reshape(1))
    if not own:
        return logits.new_zeros(())
    mine = torch.cat(own)
    tokens_here = mine.new_full((1,), logits.shape[0])
    total = sum_over_ranks(member, torch.cat([mine, counts.double(), tokens_here]), "the router's loss")
    sums, of_counts = total[: len(mine)], total[len(mine) : -1]
    tokens = total[-1].clamp_min(1)
    sums = mine + (sums - mine).detach()
    loss = logits.new_zeros((), dtype=torch.float64)
    if router.balance == "loss":
        share = of_counts / (tokens * router.top_k)
        loss = loss + router.loss_weight * router.num_experts * (share * sums[: router.num_experts] / tokens).sum()
    if router.z_loss_weight != 0:
        loss = loss + router.z_loss_weight * sums[-1] / tokens
    return loss.to(logits.dtype)
