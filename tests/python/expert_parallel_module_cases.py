"""Cases of test_expert_parallel.py: the layer as a module: its router, its state dict, its group and what it keeps."""

import io

import torch
import torch.distributed as dist

import moxie.nn
from expert_parallel_layers import (
    DIM,
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOP_K,
    cases_of,
    compare,
    error_of,
    inputs,
    layers,
    shares,
    summed,
)
from wire_reference import decibels

NAMES, case = cases_of(globals())


@case
def losses_and_biases_are_those_of_all_tokens(rank, size):
    counts = [TOKENS + 7 * i for i in range(size)]
    mine, total = shares(rank, size, counts)
    for options in (
        {"balance": "loss", "z_loss_weight": 1e-2},
        {"balance": "loss", "score": "sigmoid", "loss_weight": 0.5},
        {"z_loss_weight": 1.0},
    ):
        local, parallel = layers(size, dist.group.WORLD, dtype=torch.float32, **options)
        torch.manual_seed(6)
        x = inputs("normal", total, torch.float32)
        for layer, tokens in ((local, x), (parallel, x[mine])):
            layer(tokens)
            layer.loss.backward()
        assert abs(parallel.loss.item() / local.loss.item() - 1) < 1e-6, options
        everyone = [torch.zeros(()) for _ in range(size)]
        dist.all_gather(everyone, parallel.loss.detach())
        assert all(torch.equal(loss, parallel.loss) for loss in everyone), "one number on all ranks"
        gate = summed(parallel.router.gate.weight.grad)
        assert decibels(gate, local.router.gate.weight.grad) >= 90, options
    local, parallel = layers(size, dist.group.WORLD, dtype=torch.float32, score="sigmoid", balance="bias", bias_rate=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        x = inputs("normal", total, torch.float32)
        local(x)
        parallel(x[mine])
        local.router.update_bias_()
        parallel.router.update_bias_()
        assert torch.equal(local.router.bias, parallel.router.bias)
        assert parallel.router.load.count_nonzero() == 0


@case
def the_state_dict_has_the_names_of_the_local_layer_and_local_experts(rank, size):
    local, parallel = layers(size, dist.group.WORLD, shared_hidden_dim=64, balance="bias", score="sigmoid", bias=True)
    whole, part = local.state_dict(), parallel.state_dict()
    assert list(whole) == list(part)
    experts = EXPERTS // size
    for name, value in part.items():
        expected = whole[name]
        if name in ("experts.w13", "experts.w2", "experts.b13", "experts.b2"):
            expected = expected[rank * experts : (rank + 1) * experts]
        assert torch.equal(value, expected), name
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = inputs("normal", TOKENS, torch.bfloat16)
    assert torch.equal(again(x), parallel(x))


@case
def a_mesh_dimension_is_a_group(rank, size):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "ep"))
    local, parallel = layers(size, mesh["ep"])
    mine, total = shares(rank, size)
    torch.manual_seed(10)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8")
    error = error_of(lambda: moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, ep_group=mesh))
    assert isinstance(error, ValueError) and "one dimension" in str(error), error


@case
def received_tokens_are_kept_once_and_in_fp8(rank, size):
    _, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil_128", weight_cache=True)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    x = inputs("normal", TOKENS, torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parallel(x)
    messages = [tensor for tensor in kept if tensor.dtype == torch.uint8 and tensor.dim() == 1]
    h = [tensor for tensor in kept if tensor.dtype == torch.bfloat16 and tensor.shape[-1] == 2 * HIDDEN]
    assert len(messages) == 1 and len(h) == 1
    row, pairs = -(-(DIM + -(-DIM // 128)) // 16) * 16, h[0].shape[0]  # as core/layout/wire.h has it
    assert messages[0].numel() <= min(pairs, TOKENS * size) * row + 8 * pairs, "in FP8, once for each token"
    assert not any(tensor.element_size() == 1 and tensor.dim() == 2 and tensor.shape[1] == DIM for tensor in kept)
    wide = [tensor for tensor in kept if tensor.dtype == torch.bfloat16 and tensor.shape[-1] == DIM and tensor is not x]
    assert all(tensor.shape[0] in (TOKENS, EXPERTS) for tensor in wide), [tensor.shape for tensor in wide]
