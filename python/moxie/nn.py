"""Modules of a mixture-of-experts layer: Router, GroupedExperts, SharedExperts, MoE.

    x[T, D] -Router-> ids, weights [T, k] -route-> offs [E], slot_of, row_of
            -GroupedExperts (permute, w13, SwiGLU, w2)-> rows [R, D] -unpermute, weighted-> y[T, D]  (+ SharedExperts(x))

R = T * k. No token is dropped, and no module waits for the device.
"""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from moxie import gemm, moe
from moxie.dtensors import any_dtensor
from moxie.ops import Activation
from moxie.recipe import AnyRecipe, Recipe
from moxie.router import Router, check_choice, held
from moxie.router import Routing as Routing  # re-exported: users import it from here
from moxie.stats import PARTS, STATS

if TYPE_CHECKING:
    from moxie.converted import Conversion
    from moxie.expert_parallel import Engine, Member, Wire

_ops = torch.ops.moxie

Matrices = Tensor | Sequence[Tensor]  # one matrix per expert: a stacked tensor, or a list


class Uncast:
    """Wraps a tensor argument of a module, so that FSDP2's mixed precision, which casts tensor arguments, does not see it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class GroupedExperts(nn.Module):
    """The MLPs of all experts: w13 [E, 2F, D], the gate rows before the up rows, and w2 [E, D, F].

    `activation` is that of `moxie.swiglu`. `bias` adds b13 [E, 2F] and b2 [E, D]. `transposed` stores w13 as [E, D, 2F] and w2
    as [E, F, D]. With `w13_layout="interleaved"`, gate and up rows alternate in w13 and b13 (columns of w13, if transposed).
    With `main_grad`, backward adds to `w13.main_grad` and `w2.main_grad`, f32 tensors that you provide, and leaves `.grad` alone.

    Backward needs h, the result of the product with w13. `keep` chooses how it is stored: "h" unchanged, "h_fp8" in FP8
    (docs/MOE.md). `weight_cache` keeps w13 and w2 quantized; refresh the caches after each optimizer step, with
    `refresh_after(optimizer)` or `refresh_()`. While `collect_stats` is on, forward and backward add quantization errors to
    `stats`, f64 [2, 6, 5]: one entry per product (w13, w2), operand (`moxie.stats.PARTS`) and sum (`moxie.stats.STATS`). The
    results of the layer do not change.

    >>> experts = moxie.nn.GroupedExperts(64, 96, num_experts=2)
    >>> experts(torch.randn(5, 64), torch.tensor([2, 5], dtype=torch.int32)).shape
    torch.Size([5, 64])
    """

    # Defaults as class attributes, because older pickles lack these fields.
    keep: Literal["h", "h_fp8"] = "h"
    activation: Activation = "swiglu"
    w13_layout: gemm.W13Layout = "concatenated"
    transposed: bool = False
    main_grad: bool = False
    w13: nn.Parameter
    w2: nn.Parameter
    b13: nn.Parameter | None
    b2: nn.Parameter | None
    stats: Tensor
    # Set only if quantize_ has changed the recipe:
    _conversion: "Conversion"
    _recipe_before: tuple[str, bool]  # the recipe before quantize_ changed it, and whether there was a weight cache

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        recipe: AnyRecipe = gemm.DEFAULT_RECIPE,
        weight_cache: bool = False,
        keep: Literal["h", "h_fp8"] = "h",
        activation: Activation = "swiglu",
        bias: bool = False,
        w13_layout: gemm.W13Layout = "concatenated",
        transposed: bool = False,
        main_grad: bool = False,
        collect_stats: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_choice("GroupedExperts", "keep", keep, ("h", "h_fp8"))
        check_choice("GroupedExperts", "activation", activation, ("swiglu", "clamped_swiglu"))
        check_choice("GroupedExperts", "w13_layout", w13_layout, ("concatenated", "interleaved"))
        self.keep, self.activation, self.w13_layout = keep, activation, w13_layout
        self.transposed, self.main_grad = transposed, main_grad
        self.collect_stats = collect_stats
        self.register_buffer(
            "stats", torch.zeros(2, len(PARTS), len(STATS), device=device, dtype=torch.float64), persistent=False
        )
        for name, out, contracted in (("13", 2 * hidden_dim, dim), ("2", dim, hidden_dim)):
            shape = (contracted, out) if transposed else (out, contracted)
            weight = nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))
            self.register_parameter(f"w{name}", weight)
            of_bias = nn.Parameter(torch.empty(num_experts, out, device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"b{name}", of_bias)
        self.reset_parameters()
        self.set_recipe_(recipe, weight_cache=weight_cache)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for name in ("b13", "b2"):  # older pickles lack these entries
            self._parameters.setdefault(name, None)

    def set_recipe_(self, recipe: AnyRecipe, *, weight_cache: bool = False) -> None:
        cached = _quantizes(str(recipe)) and weight_cache  # comes first, because it raises for an invalid recipe
        self.recipe = str(recipe)
        stored: dict[str, Any] = {"recipe": recipe, "transposed": self.transposed}
        self.cache13 = gemm.WeightCache(self.w13, w13_layout=self.w13_layout, **stored) if cached else None
        self.cache2 = gemm.WeightCache(self.w2, **stored) if cached else None

    def reset_parameters(self) -> None:
        for weight, bias in ((self.w13, self.b13), (self.w2, self.b2)):
            bound = 1 / math.sqrt(self._as_taken(weight).shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)
        self.reset_stats_()

    def _as_taken(self, w: Tensor) -> Tensor:
        """Returns w13, w2 or one of their main gradients as a view [E, out, in]."""
        return w.mT if self.transposed else w

    def _main_grad(self, name: str) -> Tensor | None:
        if not self.main_grad:
            return None
        weight = getattr(self, name)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return None
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise ValueError(f"GroupedExperts: main_grad=True needs {name}.main_grad, f32 {list(weight.shape)}, got none")
        return self._as_taken(main_grad)

    @torch.no_grad()
    def reset_stats_(self) -> None:
        self.stats.zero_()

    def _apply(self, fn, recurse: bool = True):
        stats = self.stats
        super()._apply(fn, recurse)
        if self.stats.dtype != torch.float64:
            self.stats = stats.to(self.stats.device)  # keeps f64: sums of millions of elements do not fit bf16
        return self

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
        """x is rows [R, D], sorted by expert. If slot_of and row_of are given, x is tokens [T, D], which are permuted first. If
        weights [T, top_k] is given as well, the result is the weighted sum of each token's rows, [T, D]."""
        weights = weights.tensor if isinstance(weights, Uncast) else weights
        parameter13, parameter2 = held(self, "w13"), held(self, "w2")
        cache13, cache2 = gemm.live_cache(self.cache13, parameter13), gemm.live_cache(self.cache2, parameter2)
        w13, w2 = self._as_taken(parameter13), self._as_taken(parameter2)
        b13, b2 = held(self, "b13"), held(self, "b2")
        seldom: dict[str, Any] = {
            "keep": self.keep,
            "activation": self.activation,
            "b13": b13,
            "b2": b2,
            "w13_layout": self.w13_layout,
        }
        if self.main_grad:
            seldom |= {"main_grad13": self._main_grad("w13"), "main_grad2": self._main_grad("w2")}
        options = gemm.not_default(seldom)
        options |= {"recipe": self.recipe, "slot_of": slot_of, "row_of": row_of, "top_k": top_k, "weights": weights}
        if not self.collect_stats:
            plain = cache13 is None and cache2 is None and not self.main_grad
            if plain and not any_dtensor(x, w13, w2, weights, b13, b2):
                return _ops.expert_mlp(x, w13, w2, offs, **options)  # as below, where nothing is left to check
            return gemm.expert_mlp(x, w13, w2, offs, quantized_w13=cache13, quantized_w2=cache2, **options)
        caches = {"quantized_w13": _tensors(cache13), "quantized_w2": _tensors(cache2)}
        return _ops.expert_mlp.stats(x, w13, w2, self.stats, offs, **caches, **options)

    def check(self) -> None:
        """Raises if these experts have failed. Those of one process do not."""

    def refresh_(self) -> None:
        # Pass the parameters, because they may have been replaced since the caches were made.
        for cache, weight in ((self.cache13, self.w13), (self.cache2, self.w2)):
            if cache is not None and not any_dtensor(weight):  # sharded weights are quantized in every forward
                cache.refresh_(weight)

    def refresh_after(self, optimizer: torch.optim.Optimizer):
        """Calls refresh_() after every step of the optimizer. Remove the returned handle to stop that."""
        return optimizer.register_step_post_hook(lambda *_: self.refresh_())

    @torch.no_grad()
    def load_weights_(
        self,
        *,
        w1: Matrices | None = None,
        w2: Matrices | None = None,
        w3: Matrices | None = None,
        w13: Matrices | None = None,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        transposed: bool = False,
        interleaved: bool = False,
    ) -> None:
        """Copies weights: w1 (gate) and w3 (up), each [E, F, D], or w13 [E, 2F, D]; w2 [E, D, F]. Lists of matrices work too.
        Biases are b13 [E, 2F] and b2 [E, D].

        `transposed` and `interleaved` describe the arguments, not how this module stores its weights. `transposed`: matrices are
        [in, out], as `x @ w` takes them. `interleaved`: gate and up outputs alternate in w13 and b13. Omitted weights are
        unchanged. Shapes are checked first; on error nothing is copied.
        """
        if (w1 is None) != (w3 is None) or (w1 is not None and w13 is not None):
            raise ValueError("GroupedExperts.load_weights_: give w1 and w3 together, or w13 alone")
        own13, own2 = self._as_taken(self.w13), self._as_taken(self.w2)
        experts, twice, dim = own13.shape
        half = (experts, twice // 2, dim)
        # Check all of them before anything is copied.
        w1, w3 = _matrices("w1", w1, half, transposed), _matrices("w3", w3, half, transposed)
        w13, w2 = _matrices("w13", w13, own13.shape, transposed), _matrices("w2", w2, own2.shape, transposed)
        _check_bias("b13", b13, self.b13)
        _check_bias("b2", b2, self.b2)
        if interleaved:
            w13 = None if w13 is None else gemm.concatenated(w13)
            b13 = None if b13 is None else gemm.concatenated(b13)
        if w1 is not None and w3 is not None:
            w13 = torch.cat([w1, w3], dim=1)
        for own, given in ((own13, w13), (self.b13, b13)):
            if own is not None and given is not None:
                if self.w13_layout == "interleaved":
                    gemm.halves_of_interleaved(own).copy_(given.unflatten(1, (2, -1)))
                else:
                    own.copy_(given)
        for own, given in ((own2, w2), (self.b2, b2)):
            if own is not None and given is not None:
                own.copy_(given)
        self.refresh_()


class SharedExperts(nn.Module):
    """An MLP that is applied to every token: one expert without routing.

    >>> moxie.nn.SharedExperts(64, 96)(torch.randn(5, 64)).shape
    torch.Size([5, 64])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        recipe: AnyRecipe = gemm.DEFAULT_RECIPE,
        weight_cache: bool = False,
        keep: Literal["h", "h_fp8"] = "h",
        activation: Activation = "swiglu",
        bias: bool = False,
        w13_layout: gemm.W13Layout = "concatenated",
        transposed: bool = False,
        main_grad: bool = False,
        collect_stats: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.experts = GroupedExperts(
            dim,
            hidden_dim,
            1,
            recipe=recipe,
            weight_cache=weight_cache,
            keep=keep,
            activation=activation,
            bias=bias,
            w13_layout=w13_layout,
            transposed=transposed,
            main_grad=main_grad,
            collect_stats=collect_stats,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


class MoE(nn.Module):
    """A mixture-of-experts layer: a router, experts and, if shared_hidden_dim is given, a shared expert. x is [.., D].

    `loss` is the router's loss of the last forward pass: add it to the model's loss. `keep`, `activation`, `bias`, `w13_layout`,
    `transposed` and `main_grad` are those of GroupedExperts, and apply to the shared expert too. `ep_group`, a process group or
    a one-dimensional device mesh, distributes the experts over its ranks (docs/EXPERT_PARALLEL.md). `wire` is then the format in
    which tokens are sent: "fp8", the default of recipes that allow it, or "unquantized". `engine` is what carries them: "c10d",
    the default, or "symmetric", or `moxie.symmetric.Symmetric(max_rows=.., ..)`.

    >>> layer = moxie.nn.MoE(64, 96, num_experts=4, top_k=2)
    >>> y = layer(torch.randn(2, 5, 64))
    >>> (y.square().mean() + layer.loss).backward()
    >>> y.shape, layer.experts.w13.grad.shape
    (torch.Size([2, 5, 64]), torch.Size([4, 192, 64]))
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        recipe: AnyRecipe = gemm.DEFAULT_RECIPE,
        shared_hidden_dim: int | None = None,
        weight_cache: bool = False,
        keep: Literal["h", "h_fp8"] = "h",
        activation: Activation = "swiglu",
        bias: bool = False,
        w13_layout: gemm.W13Layout = "concatenated",
        transposed: bool = False,
        main_grad: bool = False,
        collect_stats: bool = False,
        ep_group: Any = None,
        wire: "Wire | None" = None,
        engine: "Engine | None" = None,
        device=None,
        dtype=None,
        **router,
    ):
        super().__init__()
        options: dict[str, Any] = {
            "recipe": recipe,
            "weight_cache": weight_cache,
            "keep": keep,
            "activation": activation,
            "bias": bias,
            "w13_layout": w13_layout,
            "transposed": transposed,
            "main_grad": main_grad,
            "collect_stats": collect_stats,
            "device": device,
            "dtype": dtype,
        }
        sizes = {"dim": dim, "hidden_dim": hidden_dim, "shared_hidden_dim": shared_hidden_dim, "num_experts": num_experts}
        member = _join(ep_group, wire, engine, {**sizes, "top_k": top_k, **options, **router})
        self.router = Router(dim, num_experts, top_k, device=device, dtype=dtype, **router)
        self.router.member = member
        make_experts = GroupedExperts if member is None else _parallel_experts(member, wire, engine)
        self.experts: GroupedExperts = make_experts(dim, hidden_dim, num_experts, **options)
        self.shared = None if shared_hidden_dim is None else SharedExperts(dim, shared_hidden_dim, **options)
        self.loss = torch.zeros(())

    def __getstate__(self) -> dict:
        return {**self.__dict__, "loss": self.loss.detach()}  # detached, because copy and pickle refuse tensors inside a graph

    def check(self) -> None:
        """Waits for the device, and raises if an exchange of the symmetric engine has failed (docs/EXPERT_PARALLEL.md)."""
        self.experts.check()

    def refresh_(self) -> None:
        """Quantizes the cached weights again."""
        self.experts.refresh_()
        if self.shared is not None:
            self.shared.experts.refresh_()

    def refresh_after(self, optimizer: torch.optim.Optimizer):
        """Calls refresh_() after every step of the optimizer. Remove the returned handle to stop that."""
        return optimizer.register_step_post_hook(lambda *_: self.refresh_())

    def forward(self, x: Tensor) -> Tensor:
        if any_dtensor(x):
            from moxie.distributed import products

            if self.router.member is not None:
                self.router.member.refuse_tokens_of_group(x)
            return products.on_whole_tokens(self, x)
        modules: dict[str, Any] = self._modules  # read directly for the same reason as in held()
        router, experts = modules["router"], modules["experts"]
        # Also of a matrix, unless the router joins gradients: gradients of x then add up in the same order.
        joins = x.dim() == 2 and getattr(router, "joins_gradients", False)
        tokens = x if joins else x.reshape(-1, x.shape[-1])
        routing = router(tokens)
        # Only if the router has seen these very tokens, with gradients: a hook may give it others, and it may run under no_grad.
        if routing.of is tokens and routing.tokens is not None and routing.tokens.requires_grad:
            tokens = routing.tokens
        # Set only if there is a loss: torch.compile refuses to set attributes inside activation checkpointing.
        if routing.losses is not None:
            self.loss = routing.losses
        offs, slot_of, row_of = moe.route(routing.ids, router.num_experts)
        y = experts(tokens, offs, slot_of=slot_of, row_of=row_of, top_k=router.top_k, weights=Uncast(routing.weights))
        if self.shared is not None:
            y = y + self.shared(tokens)
        if router.member is not None and any_dtensor(y) and torch.compiler.is_compiling():
            # The graph that begins after the exchange must not end with a view of a DTensor: torch makes it by as_strided(),
            # whose backward DTensors do not have.
            return torch.compiler.disable(_reshape)(y, x.shape)
        return y if y.shape == x.shape else y.reshape(x.shape)


def _reshape(y: Tensor, shape: torch.Size) -> Tensor:
    return y.reshape(shape)


def _join(ep_group: Any, wire: "Wire | None", engine: "Engine | None", settings: dict[str, Any]) -> "Member | None":
    if ep_group is not None:
        from moxie import expert_parallel  # imported here, because some builds of torch lack torch.distributed

        return expert_parallel.join(ep_group, {**settings, "wire": wire, "engine": engine})
    for name, value in (("wire", wire), ("engine", engine)):
        if value is not None:
            raise ValueError(f"MoE: {name} is for layers with an ep_group, got {value!r}")
    return None


def _parallel_experts(member: "Member", wire: "Wire | None", engine: "Engine | None") -> Any:
    from moxie import expert_parallel

    return functools.partial(expert_parallel.ParallelExperts, member=member, wire=wire, engine=engine)


def _quantizes(recipe: str) -> bool:
    return recipe.partition(":")[0] != "identity" and Recipe.from_name(recipe).scaling != "none"


def _tensors(cache: gemm.WeightCache | None) -> list[Tensor] | None:
    return None if cache is None else cache.tensors


def _matrices(name: str, given: Matrices | None, shape: Sequence[int], transposed: bool) -> Tensor | None:
    """Returns the given weights as [E, out, in]. Raises if their shape is wrong."""
    if given is None:
        return None
    w = given if isinstance(given, Tensor) else torch.stack(list(given))
    rule = f"GroupedExperts.load_weights_: {name} must be "
    if w.dim() != 3:
        raise ValueError(f"{rule}a matrix per expert, got {list(w.shape)}")
    w = w.mT if transposed else w
    if w.shape != tuple(shape):
        hint = " (is it transposed?)" if w.mT.shape == tuple(shape) else ""
        raise ValueError(f"{rule}{list(shape)}, got {list(w.shape)}{hint}")
    return w


def _check_bias(name: str, given: Tensor | None, own: Tensor | None) -> None:
    if given is None:
        return
    if own is None:
        raise ValueError(f"GroupedExperts.load_weights_: these experts have no biases, got {name}")
    if given.shape != own.shape:
        raise ValueError(f"GroupedExperts.load_weights_: {name} must be {list(own.shape)}, got {list(given.shape)}")
