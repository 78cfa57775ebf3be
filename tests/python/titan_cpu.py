"""Runs TorchTitan 0.3.0's own trainer on a machine without a GPU:

    python -c "import titan_cpu; titan_cpu.main()" --module titan_cpu --config deepseek_v3 --override.imports titan_cpu.sdpa

TorchTitan expects a GPU and a newer torch. All that stands in for them is here, and none of it in the package:

- torch.cpu gets the functions of torch.cuda that the trainer calls;
- `dist.set_timeout` is absent from torch 2.13;
- FlexAttention has no backward on a CPU: the override `titan_cpu.sdpa` takes its place;
- Gloo does not divide in a reduction, so that FSDP has to;
- the wheel has neither the tokenizer nor the text that debug models name (`write_assets`).

The configurations here are TorchTitan's debug models with fewer layers and shorter sequences.
"""

import json
import pathlib
import random
import types
from dataclasses import replace

import torch
import torch.distributed as dist


def stand_in_for_cuda() -> None:
    """Makes torch.cpu answer what TorchTitan asks of torch.cuda. Must be called before TorchTitan's trainer is imported."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    nothing = {name: (lambda *_, **__: None) for name in ("set_device", "empty_cache", "reset_peak_memory_stats")}
    answers = {
        "get_device_name": lambda *_: "cpu",
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=2**34, name="cpu"),
        "memory_stats": lambda *_: {},
    }
    for name, function in {**nothing, **answers}.items():
        setattr(torch.cpu, name, function)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_: None


def write_assets(folder: pathlib.Path) -> None:
    """Writes a tokenizer and a text of invented words, in the places where the debug models look for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{i}" for i in range(500)]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, text in (
        ("tokenizer/tokenizer.json", tokenizer.to_str()),
        ("tokenizer/tokenizer_config.json", json.dumps({"bos_token": "<s>", "eos_token": "</s>"})),
        ("c4_test/data.json", "\n".join(json.dumps({"text": line}) for line in _lines(words))),
    ):
        path = folder / "tests" / "assets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _lines(words: list[str]) -> list[str]:
    """Returns text with something to learn: each word is followed by one of three words."""
    rng = random.Random(0)
    lines = []
    for _ in range(400):
        word, line = rng.randrange(len(words)), []
        for _ in range(80):
            line.append(words[word])
            word = (word * 7 + rng.randrange(3)) % len(words)
        lines.append(" ".join(line))
    return lines


class CountedGroup(dist.ProcessGroup):
    """Forwards all-to-alls to `inner` and appends to `sent` how many bytes each of them sends to other ranks."""

    def __init__(self, inner: dist.ProcessGroup):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.sent = inner, []

    def getBackendName(self):
        return "counted"

    def _note(self, x: torch.Tensor, splits: list[int]) -> None:
        row = x[0].numel() * x.element_size() if len(x) else 0
        counts = splits or [len(x) // self.size()] * self.size()
        self.sent.append(sum(count * row for rank, count in enumerate(counts) if rank != self.rank()))

    def alltoall_base(self, output, x, output_splits, input_splits, options):
        self._note(x, input_splits)
        return self.inner.alltoall_base(output, x, output_splits, input_splits, options)

    def all_to_all_single(self, output, x, output_splits, input_splits, options):
        self._note(x, input_splits)
        return self.inner.all_to_all_single(output, x, output_splits, input_splits, options)


class CountedMesh(str):
    """The name of a counted group. It is a str, because torch's collectives take names of groups, and has the methods that
    TorchTitan's dispatchers call on a mesh."""

    counted: CountedGroup

    @staticmethod
    def of(group: dist.ProcessGroup) -> "CountedMesh":
        mesh = CountedMesh(f"counted.{len(MESHES)}")
        mesh.counted = CountedGroup(group)
        torch._C._distributed_c10d._register_process_group(mesh, mesh.counted)
        MESHES.append(mesh)
        return mesh

    @property
    def sent(self) -> list[int]:
        return self.counted.sent

    @property
    def group_name(self) -> str:
        return str(self)

    def size(self) -> int:
        return self.counted.size()

    def rank(self) -> int:
        return self.counted.rank()

    def get_group(self) -> "CountedMesh":
        return self


MESHES: list[CountedMesh] = []


def count_bytes_of_dispatchers() -> None:
    """Makes every TorchTitan dispatcher exchange through a counted group, which is added to MESHES."""
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

    wire_meshes = BaseEPTokenDispatcher.wire_meshes
    BaseEPTokenDispatcher.wire_meshes = lambda self, *, ep_mesh: wire_meshes(
        self, ep_mesh=ep_mesh and CountedMesh.of(ep_mesh.get_group())
    )


def _smaller(config, *, layers: int):
    """Cuts a debug model to its first layers, with at least one mixture of experts, so that a step takes a second."""
    spec = config.model_spec
    spec.model.layers = spec.model.layers[:layers]
    parallelize = spec.parallelize_fn

    def parallelize_for_gloo(*args, **kwargs):
        from torch.distributed.fsdp import FSDPModule

        model = parallelize(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelize_for_gloo
    config.training = replace(config.training, local_batch_size=4, seq_len=64, steps=10, disable_cuda_graphs=True)
    config.parallelism = replace(config.parallelism, spmd_backend="partial_dtensor")
    config.debug = replace(config.debug, seed=0)
    return config


def deepseek_v3():
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    return _smaller(deepseek_v3_debugmodel(), layers=3)  # the first is dense


def qwen3_moe():
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    return _smaller(qwen3_moe_debug(), layers=2)


def main() -> None:
    stand_in_for_cuda()
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.train import main as train

    @override(target=FlexAttention.Config)
    def sdpa(cfg):
        return derive(cfg, ScaledDotProductAttention.Config)

    count_bytes_of_dispatchers()
    train()
    print(f"bytes to other ranks: {sum(sum(mesh.sent) for mesh in MESHES)}", flush=True)
