"""What quantize_ leaves alone unless it is asked for, and why."""

import re
from collections.abc import Sequence

from torch import Tensor

# The linears of language models that are left alone, by the whole name:
LM_SKIP = (
    # the output head, whose errors go straight into the loss;
    r"(.*\.)?(output|lm_head)",
    # the router, whose errors change the choice of experts, and the gate of a shared expert;
    r"(.*\.)?(router|gate|router_mlp|router_gate|shared_expert_gate)(\..*)?",
    # the projections of keys and values, too small to gain, compressed ones (multi-head latent attention) included;
    r"(.*\.)?(k|v|wk|wv|wkv|wkv_[ab]|([a-z]+_)?[kv]_proj(_.*)?|kv_proj|kv_[ab]_proj(_.*)?)(\.linear)?",
    # adapters, of a rank too low for blocks of scales, whatever PEFT calls theirs.
    r"(.*\.)?(lora|vera|randlora|hra|oft|boft|hada|lokr|ia3|bone|miss|vblora)_.*",
)

# The smallest side of a linear, or of an expert, that is converted: the elements that share a scale. What is narrower has little
# to gain, and is often sensitive (time steps of state space models, gates of heads).
SMALLEST = 32


# What PEFT puts between a module's name and the linear that does its work.
_PEFT_WRAPPER = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def is_skipped(fqn: str, skip: Sequence[str]) -> bool:
    """Whether a pattern matches the whole name of a linear, with or without the wrappers of PEFT in it."""
    names = {fqn, _PEFT_WRAPPER.sub("", fqn)}
    return any(re.fullmatch(pattern, name) for pattern in skip for name in names)


def why_too_small(weight: Tensor) -> str:
    """Why a linear is left alone for its size; "" if it is not."""
    return f"a side is smaller than {SMALLEST}" if 0 < min(weight.shape) < SMALLEST else ""


def why_no_experts(fqn: str, parameter: Tensor) -> str:
    """Why a 3D parameter is not taken for a stack of experts; "" if it is."""
    if parameter.dim() != 3:
        return ""
    if "expert" not in fqn and (parameter.shape[0] == 1 or "position" in fqn or "embed" in fqn):
        return "an embedding, or a stack of one, is no stack of experts"
    return f"a side is smaller than {SMALLEST}, so it is no stack of experts" if 0 < min(parameter.shape[1:]) < SMALLEST else ""
