"""Registers `moxie` as an experts implementation of transformers: its expert blocks then run through Moxie's fused layer.

`import moxie.hf` registers it; `from_pretrained(..., experts_implementation="moxie")` or
`model.set_experts_implementation("moxie")` chooses it. The recipe is that of the conversion (`moxie.quantize_`), or else the one
that `register` was given; without either the products are in bf16. docs/HUGGING_FACE.md is for its users.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe as _moe

from moxie.converted import Conversion, _cache_of, is_converted
from moxie.gemm import WeightCache, expert_mlp
from moxie.moe import route
from moxie.ops import Activation
from moxie.recipe import AnyRecipe, Recipe
from moxie.steps import note

NAME = "moxie"
Experts = Any  # an expert module, with the attributes that transformers' use_experts_implementation gives it

_SILU = (nn.SiLU, SiLUActivation)

# Names of expert classes whose gate function is not the default one but is one that Moxie has.
_CLAMPED = ("GptOssExperts", "OpenAIPrivacyFilterExperts", "MiniMaxM3VLExperts")
_IN_F32 = ("BeamExperts",)  # SwiGLU computed in f32, as Moxie does


def activation_of(experts: Experts) -> Activation | None:
    """Returns the Moxie activation that equals the gate function of these experts, or None if there is none."""
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        return None
    kinds = {cls.__name__ for cls in type(experts).__mro__}  # PEFT gives experts that it adapts a subclass
    if kinds.intersection(_CLAMPED):
        limit = experts.limit if hasattr(experts, "limit") else experts.swiglu_limit
        alpha = experts.alpha if hasattr(experts, "alpha") else experts.swiglu_alpha
        return "clamped_swiglu" if limit == 7.0 and alpha == 1.702 else None
    if type(experts)._apply_gate is not _moe._default_apply_gate and not kinds.intersection(_IN_F32):
        return None
    return "swiglu" if isinstance(experts.act_fn, _SILU) or experts.act_fn is F.silu else None


def _why_not(experts: Experts, w13: Any, w2: Any) -> str:
    """Returns why the fused layer cannot run these experts, or "" if it can."""
    if activation_of(experts) is None:
        return "its activation is none that Moxie fuses"
    if is_converted(w13) != is_converted(w2):
        return "one of its two weights is converted, and the other is not"
    if is_converted(w13) and w13._moxie.recipe != w2._moxie.recipe:
        return "its two weights are converted with different recipes"
    return ""


def experts_forward(
    experts: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, recipe: str = "bf16"
) -> Tensor:
    """Runs a block of experts, with the arguments that transformers passes: tokens [T, D], and the ids and weights [T, k] of
    their experts."""
    w13, activation = (experts.gate_up_proj, activation_of(experts)) if experts.has_gate else (None, None)
    why = "it has no gate" if w13 is None else _why_not(experts, w13, experts.down_proj)
    if w13 is None or activation is None or why:
        if recipe != "bf16" and not is_converted(w13):
            raise ValueError(
                f"moxie.hf: {type(experts).__name__} cannot run through the fused layer in {recipe}: {why}; convert the model "
                "with moxie.quantize_, which quantizes its products one by one"
            )
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"moxie.hf: {type(experts).__name__} runs as grouped_mm, whose products Moxie quantizes if they are converted: "
                f"{why}",
                stacklevel=2,
            )
        return _moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden_states, top_k_index, top_k_weights)
    w2, transposed, interleaved = experts.down_proj, experts.is_transposed, not experts.is_concatenated
    conversions: list[Conversion] = []
    caches: dict[str, Any] = {}
    if is_converted(w13):
        conversions = [w13._moxie, w2._moxie]
        recipe = w13._moxie.recipe
        caches = {"quantized_w13": _cache_of_w13(w13, transposed, interleaved), "quantized_w2": _cache_of(w2, transposed)}
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    offs, slot_of, row_of = _route(experts, top_k_index)
    with torch._C.DisableTorchFunctionSubclass():
        y = expert_mlp(
            hidden_states.to(w13.dtype),
            w13.mT if transposed else w13,
            w2.mT if transposed else w2,
            offs,
            recipe=recipe,
            slot_of=slot_of,
            row_of=row_of,
            top_k=top_k_index.shape[-1],
            weights=top_k_weights.float(),
            activation=activation,
            b13=biases[0],
            b2=biases[1],
            w13_layout="interleaved" if interleaved else "concatenated",
            **caches,
        )
    for conversion in conversions:
        note(conversion, y)
    return y.to(hidden_states.dtype)


def _cache_of_w13(w13: Any, transposed: bool, interleaved: bool) -> WeightCache | None:
    """Returns the weight cache of w13 if the fused layer can use it. It cannot if gates and ups alternate in the parameter, and
    so in its cache: the fused layer reads quantized weights with all gates above the ups."""
    if not interleaved or w13._moxie.cache is None:
        return _cache_of(w13, transposed)
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"moxie.hf: {w13._moxie.name}: gates and ups alternate in its weight cache, and the fused layer takes one with the "
            "gates above the ups, so it is quantized in every forward; convert it without weight_cache, which saves its memory",
            stacklevel=3,
        )
    return None


def _route(experts: Experts, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns offs, slot_of and row_of. Ids from num_experts up mark slots that another rank computes. Their rows come last, in
    no group, so that they cost nothing and add nothing."""
    ids, num_experts = ids.to(torch.int32), experts.num_experts
    # Older versions of transformers lack this attribute; then assume that such ids may occur.
    if not getattr(experts, "_is_expert_parallel", True):
        return route(ids, num_experts)
    offs, slot_of, row_of = route(ids.clamp(max=num_experts), num_experts + 1)
    return offs[:num_experts], slot_of, row_of


def register(name: str = NAME, *, recipe: AnyRecipe = "bf16") -> Callable:
    """Registers an experts implementation under a name. `recipe` is for experts that are not converted.

    >>> import moxie.hf
    >>> implementation = moxie.hf.register("moxie_rceil", recipe="mxfp8_rceil")
    """
    text = str(recipe)
    Recipe.from_name(text)  # refuses what is no recipe

    def forward(experts: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(experts, hidden_states, top_k_index, top_k_weights, recipe=text)

    _moe.ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return forward


register()
