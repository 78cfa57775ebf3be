"""Tiny transformers models, and training steps on tokens that repeat."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched

VOCABULARY = 64


def mixtral(dtype: torch.dtype = torch.float32, device="cpu", **changes):
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MixtralConfig(**{**config, **changes}), dtype=dtype).to(device)


def gpt_oss(dtype: torch.dtype = torch.float32, device="cpu"):
    from transformers import AutoModelForCausalLM, GptOssConfig

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


def tokens(device="cpu") -> torch.Tensor:
    return torch.arange(64, device=device).remainder(11).view(2, 32)


def step(model, call=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Runs a forward and a backward. Returns the loss, and the gradients by parameter name."""
    ids = tokens(next(model.parameters()).device)
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
