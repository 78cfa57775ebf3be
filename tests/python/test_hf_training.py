"""Converted transformers models in the programs that train them: PEFT, Trainer, accelerate."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
from transformers.integrations import moe

if not hasattr(moe, "ALL_EXPERTS_FUNCTIONS"):
    pytest.skip("transformers before 5 has linears for experts", allow_module_level=True)

import moxie
import moxie.hf
from hf_models import gpt_oss, mixtral, step, tokens

RECIPE = "mxfp8_rceil"
HERE = pathlib.Path(__file__).resolve().parent
IMPLEMENTATIONS = ("grouped_mm", "moxie")


def lora(model, **where):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **where))


STACKED = dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


def names_in(report) -> set[str]:
    return {name for name in report.converted if "lora" in name}


@pytest.mark.parametrize("first", ("convert", "adapt"))
def test_lora_on_linears_leaves_adapters_unquantized_and_the_rest_quantized(first, device):
    model = mixtral(device=device)
    where = dict(target_modules=["q_proj", "o_proj"])
    if first == "adapt":
        model = lora(model, **where)
    report = moxie.quantize_(model, RECIPE)
    if first == "convert":
        model = lora(model, **where)
    assert not names_in(report)
    _, grads = step(model)
    assert moxie.participation(model).check() and all("lora" in name for name in grads)
    assert all(grad.any() for grad in grads.values()) and len(grads) == 4
    assert type(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer) is moxie.MXLinear


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", ("convert", "adapt"))
def test_lora_on_stacked_experts_multiplies_quantized_sums(first, implementation, device):
    """PEFT multiplies by weight + delta, a new tensor and not the parameter. Such products must be quantized all the same."""
    model = mixtral(device=device)
    model.set_experts_implementation(implementation)
    if first == "convert":
        moxie.quantize_(model, RECIPE)
        step(model)  # a forward before PEFT
        model = lora(model, **STACKED)
    else:
        model = lora(model, **STACKED)
        assert not names_in(moxie.quantize_(model, RECIPE))
    loss, grads = step(model)
    part = moxie.participation(model).check()
    assert sum("experts" in name for name in part.backward) == 2 and all(grad.any() for grad in grads.values())
    merged = mixtral(device=device)
    merged.set_experts_implementation(implementation)
    merged = lora(merged, **STACKED).merge_and_unload()
    moxie.quantize_(merged.requires_grad_(), RECIPE)
    assert torch.allclose(loss, step(merged)[0], rtol=1e-4)  # merging adds delta to the weight in another rounding order
    plain = lora(mixtral(device=device), **STACKED)
    assert not torch.equal(loss, step(plain)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trainer_resumes_where_it_stopped(implementation, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in tokens().repeat(4, 1)]

    def train(folder, resume=None, steps=4):
        model = gpt_oss()  # not a Mixtral: Trainer does not find the experts in a checkpoint that it wrote of one
        model.set_experts_implementation(implementation)
        moxie.quantize_(model, RECIPE)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            save_steps=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            lr_scheduler_type="constant",
            seed=3,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        moxie.participation(model).check()
        return model.state_dict()

    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", steps=2)
    resumed = train(tmp_path / "parts", resume=str(tmp_path / "parts" / "checkpoint-2"))
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


RANK = """
import sys
import torch, moxie, moxie.hf
from accelerate import Accelerator
from hf_models import mixtral, tokens

for implementation in ("grouped_mm", "moxie"):
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = mixtral()
    model.set_experts_implementation(implementation)
    moxie.quantize_(model, "mxfp8_rceil")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.utils.data.DataLoader(list(tokens().repeat(4, 1)), batch_size=2)
    ddp, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for ids in data:
        loss = ddp(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    bare = accelerator.unwrap_model(ddp)
    moxie.participation(bare).check()
    weights = torch.cat([parameter.detach().flatten() for parameter in bare.parameters()])
    both = accelerator.gather(weights[None])
    assert both.shape[0] == 2 and torch.equal(both[0], both[1]), "ranks differ"
    assert losses[-1] < losses[0], losses
print("done")
"""


def test_accelerate_trains_on_two_ranks(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *(entry for entry in sys.path if entry)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=400, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr[-4000:]
