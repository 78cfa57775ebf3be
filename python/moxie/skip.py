"""The linears and parameters that quantize_ does not convert by default, with the reason for each."""

import re
from collections.abc import Sequence

from torch import Tensor

# Patterns of the linears of language models that quantize_ does not convert by default. A pattern must match the whole name.
LM_SKIP = (
    # The output head: its errors go straight into the loss.
    r"(.*\.)?(output|lm_head)",
    # The router, where an error changes the choice of experts, and the gate of a shared expert.
    r"(.*\.)?(router|gate|router_mlp|router_gate|shared_expert_gate)(\..*)?",
    # The key and value projections, including the compressed ones of multi-head latent attention: too small to run faster in FP8.
    r"(.*\.)?(k|v|wk|wv|wkv|wkv_[ab]|([a-z]+_)?[kv]_proj(_.*)?|kv_proj|kv_[ab]_proj(_.*)?)(\.linear)?",
    # PEFT's adapters, by the prefixes of all its methods: their rank is lower than the size of a block.
    r"(.*\.)?(lora|vera|randlora|hra|oft|boft|hada|lokr|ia3|bone|miss|vblora)_.*",
)

# Linears and experts with a side below 32, the smallest block, are not converted: they gain little speed and are often sensitive
# to errors (time steps of state space models, gates of attention heads).
SMALLEST = 32


# PEFT wraps modules; these are the names that it inserts between a module's name and the wrapped linear.
_PEFT_WRAPPER = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def is_skipped(fqn: str, skip: Sequence[str]) -> bool:
    """Whether a pattern of `skip` matches the whole name of a linear, as it is or without the names that PEFT inserts."""
    names = {fqn, _PEFT_WRAPPER.sub("", fqn)}
    return any(re.fullmatch(pattern, name) for pattern in skip for name in names)


def why_too_small(weight: Tensor) -> str:
    """Returns why a linear is too small to convert, or "" if it is large enough."""
    return f"a side is smaller than {SMALLEST}" if 0 < min(weight.shape) < SMALLEST else ""


def why_no_experts(fqn: str, parameter: Tensor) -> str:
    """Returns why a 3D parameter is not taken for a stack of experts, or "" if it is."""
    if parameter.dim() != 3:
        return ""
    if "expert" not in fqn and (parameter.shape[0] == 1 or "position" in fqn or "embed" in fqn):
        return "an embedding, or a stack of one, is no stack of experts"
    return f"a side is smaller than {SMALLEST}, so it is no stack of experts" if 0 < min(parameter.shape[1:]) < SMALLEST else ""


# Why a matrix outside of an nn.Linear is left alone: only its module knows whether it is a weight, and how it is multiplied.
LONE_WEIGHT = "a matrix outside of an nn.Linear, which an FqnToConfig converts under its whole name"


def is_lone_weight(fqn: str, parameter: Tensor, module_class: str) -> bool:
    """Whether a parameter outside of a linear is a weight matrix: that of all experts, one below the other (DBRX), or the weight
    of transformers' Conv1D (GPT-2). Biases of experts, which are 2D as well, are not."""
    if parameter.dim() != 2 or not parameter.is_floating_point() or min(parameter.shape) < SMALLEST:
        return False
    name = fqn.rpartition(".")[2]
    return module_class == "Conv1D" or ("experts" in fqn and "bias" not in name and not is_skipped(fqn, LM_SKIP))
