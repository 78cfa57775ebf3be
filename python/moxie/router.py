"""The router of a mixture-of-experts layer: which experts a token goes to, and with what weights."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from moxie import moe

if TYPE_CHECKING:
    from moxie.expert_parallel import Member

_ops = torch.ops.moxie


@dataclasses.dataclass
class Routing:
    """The result of a Router."""

    ids: Tensor  # int32 [T, k]
    weights: Tensor  # f32 [T, k]
    losses: Tensor | None = None  # the weighted sum of the router's losses, f32 []; None if it has none
    # The router's input, and the same tokens for other layers: the router's node adds the gradient of what uses these to its own
    # (Router.joins_gradients).
    of: Tensor | None = None
    tokens: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """`losses`, or 0. A zero is made only when it is read, because on a GPU it is a kernel, and no layer reads it."""
        return self.weights.new_zeros(()) if self.losses is None else self.losses


class Router(nn.Module):
    """Chooses top_k experts per token and their weights.

    `score` turns logits into scores: softmax over the experts, or the sigmoid of each. `normalize` makes the k weights of a token
    add up to 1; `scale` multiplies them. `balance` is "none", "bias" or "loss". "bias" adds a bias per expert to the scores when
    experts are chosen, but not to the weights; `update_bias_()` lowers the bias of experts with too many tokens, and raises the
    others. "loss" is the usual auxiliary loss, times `loss_weight`. `z_loss_weight` is the weight of a second loss, the mean
    squared logsumexp of the logits.

    >>> router = moxie.nn.Router(16, num_experts=4, top_k=2, score="sigmoid", balance="bias")
    >>> routing = router(torch.randn(5, 16))
    >>> routing.ids.shape, routing.weights.shape
    (torch.Size([5, 2]), torch.Size([5, 2]))
    """

    bias: Tensor  # exists only if balance is "bias"
    load: Tensor
    member: "Member | None" = None  # this rank's place in the ep_group, over which loads are summed (expert_parallel.py)

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        balance: Literal["none", "bias", "loss"] = "none",
        bias_rate: float = 1e-3,
        loss_weight: float = 1e-2,
        z_loss_weight: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_choice("Router", "score", score, ("softmax", "sigmoid"))
        check_choice("Router", "balance", balance, ("none", "bias", "loss"))
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"Router: top_k must be 1 to the {num_experts} experts, got {top_k}")
        self.num_experts, self.top_k, self.score, self.normalize, self.scale = num_experts, top_k, score, normalize, scale
        self.balance, self.bias_rate, self.loss_weight, self.z_loss_weight = balance, bias_rate, loss_weight, z_loss_weight
        self.gate = nn.Linear(dim, num_experts, bias=False, device=device, dtype=dtype)
        if balance == "bias":
            self.register_buffer("bias", torch.zeros(num_experts, device=device, dtype=torch.float32))
        # Rows that each expert got in training since reset_load_(). The counts stay on the device, so only reading them waits.
        self.register_buffer("load", torch.zeros(num_experts, device=device, dtype=torch.int64), persistent=False)

    @property
    def has_loss(self) -> bool:
        return self.balance == "loss" or self.z_loss_weight != 0

    @property
    def joins_gradients(self) -> bool:
        """Whether gradients of x are added by the router's node, which costs the host less. torch.compile adds them in its own
        kernels."""
        return not self.has_loss and not torch.compiler.is_compiling()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.gate.reset_parameters()
        if self.balance == "bias":
            self.bias.zero_()
        self.reset_load_()

    def forward(self, x: Tensor) -> Routing:
        weight = held(self._modules["gate"], "weight")
        bias = held(self, "bias") if self.balance == "bias" else None
        sigmoid, normalize, scale = self.score == "sigmoid", self.normalize, self.scale
        if self.joins_gradients:
            load = held(self, "load") if self.training else None
            weights, ids, tokens = _ops._choose_experts_once(x, weight, bias, self.top_k, sigmoid, normalize, scale, load)
            return Routing(ids, weights, of=x, tokens=tokens if x.requires_grad else None)
        losses = None
        if self.has_loss:
            logits = moe.gate_logits(x, weight)
            weights, ids, counts = _ops._select_experts(
                logits, bias, self.top_k, sigmoid=sigmoid, normalize=normalize, scale=scale
            )
            losses = self._loss(logits, counts)
        else:  # one node, because nothing else needs the logits
            weights, ids, counts = _ops._choose_experts(x, weight, bias, self.top_k, sigmoid, normalize, scale)
        if self.training:
            _ops._add_once_(held(self, "load"), counts)  # adds nothing when activation checkpointing repeats this forward
        return Routing(ids, weights, losses)

    def _apply(self, fn, recurse: bool = True):
        bias = self._buffers.get("bias")
        super()._apply(fn, recurse)
        if bias is not None and self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)  # keeps f32: bf16 would round away updates as small as bias_rate
        return self

    def _loss(self, logits: Tensor, counts: Tensor) -> Tensor:
        if self.member is not None:
            from moxie import expert_parallel

            return expert_parallel.router_loss(self, self.member, logits, counts)
        loss = logits.new_zeros(())
        tokens = max(logits.shape[0], 1)
        if self.balance == "loss":
            # The loss, before loss_weight, is E * sum over experts of (share of the rows) * (mean probability). It is 1 if the
            # load is even.
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            probability = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
            share = counts.to(scores.dtype) / (tokens * self.top_k)
            loss = loss + self.loss_weight * self.num_experts * (share * probability.sum(0) / tokens).sum()
        if self.z_loss_weight != 0:
            loss = loss + self.z_loss_weight * logits.logsumexp(-1).square().sum() / tokens
        return loss

    @torch.no_grad()
    def update_bias_(self, group: Any = None) -> None:
        """Lowers the bias of experts with more than the mean load by bias_rate, raises the others by bias_rate, and resets the
        load. Call it once per step, on every rank: the load is summed over the layer's ep_group. If replicas of the layer see
        different tokens (data parallelism, FSDP2), pass their process group or mesh dimension as `group`: the load is then summed
        over it as well. Otherwise the biases of the replicas drift apart."""
        if self.balance != "bias":
            raise ValueError(f"Router.update_bias_: balance must be bias, got {self.balance}")
        load = self.load if self.member is None else _ops._sum_over_group(self.load, self.member.name, "the load of experts")
        if group is not None:
            load = load.clone()
            torch.distributed.all_reduce(load, group=group.get_group() if hasattr(group, "get_group") else group)
        load = load.to(torch.float32)
        self.bias += self.bias_rate * torch.sign(load.mean() - load)
        self.reset_load_()

    @torch.no_grad()
    def reset_load_(self) -> None:
        self.load.zero_()


def held(module: Any, name: str) -> Any:
    """Returns the parameter or buffer that module.<name> is. nn.Module finds those only after Python has raised an
    AttributeError, which takes the host 9000 instructions. With a parametrization the name is a property instead."""
    for of_kind in (module._parameters, module._buffers):
        if name in of_kind:
            return of_kind[name]
    return getattr(module, name)


def check_choice(op: str, argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{op}: {argument} must be one of {', '.join(known)}, got {value!r}")
