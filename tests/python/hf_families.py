"""Tiny models of all mixture-of-experts families in the installed version of transformers."""

import contextlib
import os
import pathlib
import re

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

# The value to set for each field of a config, by the field's name. Fields that a config does not have are skipped.
SIZES = dict(
    vocab_size=64, hidden_size=64, d_model=64, intermediate_size=96, ffn_hidden_size=96, d_ff=96, moe_intermediate_size=96,
    expert_intermediate_size=96, expert_ffn_hidden_size=96, shared_expert_intermediate_size=64, intermediate_size_mlp=96,
    shared_intermediate_size=64, moe_shared_expert_intermediate_size=64, ffn_dim=96, mlp_hidden_size=96,
    dense_intermediate_size=96, mlp_ffn_hidden_size=96, moe_latent_size=64, num_hidden_layers=2, num_layers=2, n_layers=2,
    num_decoder_layers=2,
    num_encoder_layers=2, encoder_layers=2, decoder_layers=2, depth=2, num_attention_heads=4, n_heads=4, num_heads=4,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_key_value_heads=2,
    num_global_key_value_heads=2, swa_num_key_value_heads=2, swa_num_attention_heads=4, head_dim=16, v_head_dim=16,
    swa_head_dim=16, swa_v_head_dim=16, global_head_dim=16, attention_head_dim=16, kv_channels=16, d_kv=16, qk_nope_head_dim=16,
    qk_rope_head_dim=16, qk_head_dim=32, kv_lora_rank=32, q_lora_rank=32, o_lora_rank=32, o_groups=2, index_head_dim=32,
    index_n_heads=2, index_topk=8, num_experts=4, n_routed_experts=4, num_local_experts=4, moe_num_experts=4,
    num_experts_per_tok=2, moe_top_k=2, moe_k=2, moe_topk=2, top_k_experts=2, experts_per_token=2, num_experts_per_token=2,
    n_shared_experts=1, num_shared_experts=1, n_group=1, num_expert_group=1, topk_group=1, first_k_dense_replace=0,
    num_dense_layers=0, moe_layer_start_index=0, zero_expert_num=0, mlp_only_layers=[], max_position_embeddings=128,
    sliding_window=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_head_dim=16, linear_num_heads=4, share_expert_dim=64, num_sliding_attention_heads=4,
    mamba_num_heads=8, mamba_n_heads=8, mamba_head_dim=16, mamba_d_head=16, mamba_n_groups=1, n_groups=1, mamba_d_state=16,
    ssm_state_size=16, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0,
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=64, num_kv_shared_layers=0, rotary_dim=16, image_size=32,
    patch_size=16, num_nextn_predict_layers=0, expert_capacity=64, encoder_sparse_step=1, decoder_sparse_step=1,
    num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, chunk_size=16, attention_chunk_size=16, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=0,
)  # fmt: skip

# What some families need in addition to SIZES, or instead: config fields by family.
ATTENTION = ["full_attention"] * 2
OF_FAMILY: dict[str, dict] = {
    "deepseek_v2": dict(num_experts_per_tok=2),
    "doge": dict(is_moe=True),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=0),
    "gemma4": dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=96),
    "diffusion_gemma": dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=96),
    "glm4v_moe": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                                       "mrope_section": [1, 1, 2]}),
    "hunyuan_v1_moe": dict(head_dim=16, num_experts=4, moe_topk=2),
    "hy_v4": dict(indexer_types=["full", "full"]),
    "deepseek_ocr2": dict(mlp_layer_types=["sparse", "sparse"], num_experts_per_tok=2),
    "ernie4_5_vl_moe": dict(head_dim=128),
    "qwen4_exp": dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4),
    "mistral4": dict(num_labels=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
                                      "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 128}),
    "mistral_large4": dict(kv_source_layers=[0, 1]),
    "nemotron_h": dict(layers_block_type=["full_attention", "moe"]),
    "step3p7": dict(sliding_window=16),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"]),
    "llama4": dict(moe_layers=[0, 1]),
    "lfm2_moe": dict(layer_types=ATTENTION, num_dense_layers=0),
    "dbrx": dict(rope_theta=10000.0, clip_qkv=8.0),
    "switch_transformers": dict(decoder_start_token_id=0),
}  # fmt: skip
OF_FAMILY["granitemoehybrid"] = dict(layer_types=["linear_attention", "full_attention"])
if transformers.__version__.startswith("4."):
    OF_FAMILY["granitemoehybrid"] = dict(layer_types=["mamba", "attention"])
    del OF_FAMILY["glm4v_moe"]
    OF_FAMILY["qwen3_vl_moe"] = dict(rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]})
LAYERS = 2  # config lists with one entry per layer are cut to this length


def families() -> list[str]:
    """Returns the names of the families whose source has a module class of experts or of an MoE layer."""
    folder = pathlib.Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"^class \w*(Experts|SparseMoe|MoE|Moe)\w*\(nn\.Module", re.MULTILINE)
    found = [path.parent.name for path in folder.glob("*/modeling_*.py") if pattern.search(path.read_text())]
    return sorted(set(found) - {"vitpose_backbone"})  # its experts are per dataset, chosen by the caller and not by a router


def shrink(config: transformers.PretrainedConfig, family: str) -> None:
    """Sets the sizes in a config, and in the configs it contains, to tiny ones."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value, family)
        elif isinstance(value, (list, tuple)) and len(value) > LAYERS and re.search("layer|pattern|_types$", name):
            # Keep the last entries: layers with experts and attention come late in these lists.
            _set(config, name, type(value)(value[-LAYERS:]))
    for name, value in SIZES.items():
        if vars(config).get(name) is not None:
            _set(config, name, value)
    if "kv_lora_rank" in vars(config):  # with compressed keys and values, there must be as many key-value heads as query heads
        _set(config, "num_key_value_heads", 4)
    for name, value in OF_FAMILY.get(family, {}).items():
        _set(config, name, value)


def _set(config: transformers.PretrainedConfig, name: str, value: object) -> None:
    with contextlib.suppress(Exception):  # some fields are computed from others and cannot be set
        setattr(config, name, value)


class NotBuiltError(Exception):
    """Raised if no config of a family gives a tiny model with experts. The message says why."""


def build(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", *, seed: int = 0) -> nn.Module:
    """Builds a tiny model of a family that has experts: its causal language model if there is one, else another of its models.
    `seed` determines its weights."""
    reasons = []
    for model_type in CONFIG_MAPPING_NAMES:
        if model_type_to_module_name(model_type) != family:
            continue
        try:
            config = CONFIG_MAPPING[model_type]()
            shrink(config, family)
            for mapping in _MAPPINGS:
                if type(config) in mapping:
                    kind = mapping[type(config)]
                    torch.manual_seed(seed)
                    with torch.device(device):
                        model = (kind[0] if isinstance(kind, tuple) else kind)(config).to(dtype)
                    if any(re.search(r"expert|linear\.weight|router_gate", name) for name, _ in model.named_parameters()):
                        return model
                    reasons.append(f"{model_type}: no experts")
                    break
        except Exception as error:
            reasons.append(f"{model_type}: {type(error).__name__}: {error}".splitlines()[0][:200])
    raise NotBuiltError("; ".join(reasons) or "no model of this family stands alone")


_MAPPINGS = [
    getattr(modeling_auto, name)
    for name in (
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_MAPPING",
    )
    if hasattr(modeling_auto, name)
]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a forward pass on text: the model's own, or the mean square of its output if it computes none."""
    out = model(input_ids=ids, labels=ids)
    return out.loss if getattr(out, "loss", None) is not None else out[0].float().square().mean()


def experts_of(model: nn.Module) -> list[str]:
    """Returns the names of the 3D expert parameters, except those in vision towers, which text does not reach."""
    pattern = re.compile(r"^(?!.*vision_moe).*(experts|(in|out)put_linear)")
    return [name for name, p in model.named_parameters() if p.dim() == 3 and pattern.search(name)]
