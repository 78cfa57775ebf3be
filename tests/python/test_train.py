"""`moxie train`: what a run promises, tested on the program itself with a model that trains in a second."""

import json
import math
import random
import signal
import subprocess
import time

import pytest
import torch

from program import (
    checkpoints,
    command,
    metrics,
    micro,
    read_tensors,
    run,
    train,
    write_tensors,
)


def weights_of(folder):
    return (folder / "weights.safetensors").read_bytes()


# ---- what a run leaves ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_config_metrics_checkpoints_and_result(finished):
    out = finished / "run"
    config = json.loads((out / "config.json").read_text())
    assert config["dim"] == 32 and config["recipe"] == ["mxfp8_rceil"]
    assert [line["step"] for line in metrics(out, "step")] == list(range(1, 7))
    assert all(math.isfinite(line["loss"]) and line["tokens_per_s"] > 0 for line in metrics(out, "step"))
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == 6 and 0 < result["eval_loss"] < 10 and result["peak_memory_bytes"] > 1 << 20
    assert metrics(out, "eval")[-1]["loss"] == result["eval_loss"]
    assert checkpoints(out) == [f"step-0000000{step}.safetensors" for step in (2, 4, 6)]


def test_only_so_many_checkpoints_are_kept(tmp_path):
    train(tmp_path, save_every=1, keep=2)
    assert checkpoints(tmp_path) == ["step-00000005.safetensors", "step-00000006.safetensors"]


def test_it_learns(tmp_path):
    train(tmp_path, steps=240, lr=1e-2, save_every=0)
    losses = [line["loss"] for line in metrics(tmp_path, "step")]
    assert sum(losses[-10:]) / 10 < 3.4 < losses[0]  # guessing bytes uniformly gives 5.5 nats, by their frequencies about 3.4


def test_it_starts_from_the_same_weights_on_every_device(finished, tmp_path, device):
    train(tmp_path, device=device, recipe=["mxfp8_rceil"])
    here, on_cpu = (metrics(out, "step")[0]["loss"] for out in (tmp_path, finished / "run"))
    # The first loss is near log 256 on every device, because the first logits are small.
    assert here == pytest.approx(on_cpu, rel=2**-8)
    assert json.loads((tmp_path / "result.json").read_text())["device"].startswith(device)


def test_expert_load_and_quantization_error_are_in_the_metrics(finished):
    out = finished / "run"
    loads = metrics(out, "load")
    assert {line["name"] for line in loads} == {"layers.0.moe", "layers.1.moe"}
    assert all(sum(line["counts"]) == 4 * 16 * 2 for line in loads)  # windows x tokens x top_k
    losses = metrics(out, "quantization")
    assert {line["name"] for line in losses} == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("attention.wq", "attention.wo", "moe.experts")
    }
    assert {line["tensor"] for line in losses if line["name"] == "layers.0.moe.experts"} == {"x", "w13", "h", "w2", "dh", "dy"}
    assert all(15 < line["sqnr_db"] < 60 for line in losses)


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path):
    done = train(tmp_path)
    assert "\r" not in done.stderr and "step 0/6" in done.stderr and "step 6/6" in done.stderr
    assert "held-out loss" in done.stdout


def test_json_is_all_that_stdout_has_when_it_is_asked_for(tmp_path):
    assert json.loads(train(tmp_path, "--json").stdout)["steps"] == 6


# ---- the same numbers again -------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(finished, tmp_path):
    train(tmp_path / "same", save_weights=tmp_path / "weights.safetensors")
    assert weights_of(tmp_path) == weights_of(finished)
    train(tmp_path / "other", save_weights=tmp_path / "weights.safetensors", seed=2)
    assert weights_of(tmp_path) != weights_of(finished)


def test_a_run_killed_at_any_moment_resumes_and_ends_with_the_same_bytes(tmp_path):
    flags = dict(steps=60, save_every=3)
    train(tmp_path / "whole", save_weights=tmp_path / "weights.safetensors", **flags)
    expected = weights_of(tmp_path)
    (tmp_path / "weights.safetensors").unlink()

    out, rng, kills, start = (
        tmp_path / "killed",
        random.Random(1),
        0,
        command("train", **micro(tmp_path / "killed", save_weights=tmp_path / "weights.safetensors", **flags)),
    )
    resume = command("train", "--resume", out=out, save_weights=tmp_path / "weights.safetensors")
    last_checkpoint = 0
    while kills < 20:
        child = subprocess.Popen(
            resume if (out / "config.json").exists() else start, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        # Kill the run at a random time, before its first step or well into it. Later kills hit a run that has come further.
        time.sleep(rng.uniform(0.05, 1.2))
        child.send_signal(signal.SIGKILL)
        message = child.communicate()[1]
        assert child.returncode in (0, -signal.SIGKILL), message
        kills += 1
        names = checkpoints(out) if (out / "checkpoints").exists() else []
        found = [int(name[5:13]) for name in names if name.endswith(".safetensors")]
        assert max(found, default=0) >= last_checkpoint
        last_checkpoint = max(found, default=0)
        if child.returncode == 0:  # the run ended before the kill: start a new one for the next kills
            assert weights_of(tmp_path) == expected
            subprocess.run(["rm", "-r", out, tmp_path / "weights.safetensors"], check=True)
            last_checkpoint = 0
    done = subprocess.run(resume if (out / "config.json").exists() else start)
    assert done.returncode == 0
    assert weights_of(tmp_path) == expected
    assert [line["step"] for line in metrics(out, "step")] == list(range(1, 61))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_a_checkpoint_and_goes_on_where_it_was(tmp_path, number):
    flags = dict(steps=400, save_every=0)
    child = subprocess.Popen(
        command("train", **micro(tmp_path / "run", **flags)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics(tmp_path / "run", "step"):
        time.sleep(0.02)
    child.send_signal(number)
    _, message = child.communicate()
    assert child.returncode == 130 and "--resume --out" in message
    (name,) = checkpoints(tmp_path / "run")
    done = run("train", "--resume", "--json", out=tmp_path / "run")
    assert done.returncode == 0 and f"resumed at step {int(name[5:13])}" in done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run", "step")] == list(range(1, 401))


def test_micro_batches_add_up_to_the_whole_batch(tmp_path):
    flags = dict(dtype="f32", recipe="bf16", steps=3, balance="none", save_every=0)
    train(tmp_path / "whole", **flags)
    train(tmp_path / "parts", batch=2, accumulate=2, **flags)
    whole, parts = (metrics(tmp_path / name, "step") for name in ("whole", "parts"))
    for a, b in zip(whole, parts):
        # Losses are added up in another order in f32, and AdamW's first steps may turn a tiny gradient's rounding error into a
        # change of a weight by lr.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


# ---- weights in and out -----------------------------------------------------------------------------------------------------


def test_weights_go_out_and_come_in_unchanged(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    train(tmp_path / "a", balance="none", save_weights=first)
    train(tmp_path / "b", balance="none", init=first, lr=0, steps=1, save_weights=second, seed=9)
    assert first.read_bytes() == second.read_bytes()
    # --init also takes a checkpoint, and a file that another program has written.
    train(
        tmp_path / "c",
        balance="none",
        init=tmp_path / "a/checkpoints/step-00000006.safetensors",
        lr=0,
        steps=1,
        save_weights=second,
    )
    assert first.read_bytes() == second.read_bytes()
    write_tensors(tmp_path / "plain.safetensors", read_tensors(first))
    train(tmp_path / "d", balance="none", init=tmp_path / "plain.safetensors", lr=0, steps=1, save_weights=second)
    assert first.read_bytes() == second.read_bytes()


def test_weights_are_named_as_the_model_names_them(finished):
    tensors = read_tensors(finished / "weights.safetensors")
    assert tensors["embed"].shape == (256, 32) and tensors["layers.1.moe.experts.w13"].shape == (4, 64, 32)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("head"), "has no tensor 'head'"),
        (lambda tensors: tensors.update(head=torch.zeros(256, 31)), "tensor 'head' must be [256, 32], got [256, 31]"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "the model has no tensor 'extra'"),
        (lambda tensors: tensors.update(head=torch.zeros(256, 32, dtype=torch.int64)), "must have a float dtype, got I64"),
    ],
)
def test_weights_that_do_not_fit_are_refused(finished, tmp_path, change, message):
    tensors = read_tensors(finished / "weights.safetensors")
    change(tensors)
    write_tensors(tmp_path / "w.safetensors", tensors)
    done = train(tmp_path / "run", init=tmp_path / "w.safetensors", code=2)
    assert message in done.stderr


# ---- a loss that is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, message",
    [
        (float("nan"), "the weight layers.1.moe.experts.w13 is not finite, first in expert 2"),
        (1e38, "the output of layers.1.moe is not finite, first in expert 2"),
    ],
)
def test_the_watch_names_the_layer_and_the_expert(finished, tmp_path, value, message):
    tensors = read_tensors(finished / "weights.safetensors")
    tensors["layers.1.moe.experts.w13"][2, :, :] = value
    tensors["layers.1.moe.router.gate.weight"].zero_()  # with equal logits, the bias below sends every token to experts 2 and 3
    tensors["layers.1.moe.router.bias"] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    write_tensors(tmp_path / "w.safetensors", tensors)
    done = train(tmp_path / "stop", init=tmp_path / "w.safetensors", code=3)
    assert message in done.stderr and "step 1" in done.stderr
    done = train(tmp_path / "skip", init=tmp_path / "w.safetensors", on_nan="skip", recipe="bf16")
    assert message in done.stderr
    assert len(metrics(tmp_path / "skip", "not_finite")) == 6


def test_the_watch_follows_gradients_back_to_where_they_broke(tmp_path):
    # A learning rate of 30 makes the last layer's weights so large that its gradients overflow first; the embedding's overflow
    # later.
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 300)
    done = train(tmp_path / "run", data=[tmp_path / "text"], lr=30, warmup=0, clip=0, weight_decay=100, steps=12, code=3)
    assert "the gradient of layers.1." in done.stderr


def test_a_last_step_that_breaks_the_model_is_noticed(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 300)
    flags = dict(data=[tmp_path / "text"], lr=1000, warmup=0, clip=0, weight_decay=1000, steps=3)
    done = train(tmp_path / "stop", code=3, **flags)
    assert "step 3: the held-out loss is not finite: " in done.stderr
    assert not (tmp_path / "stop/result.json").exists()
    done = train(tmp_path / "skip", on_nan="skip", **flags)
    assert json.loads((tmp_path / "skip/result.json").read_text())["eval_loss"] is None


# ---- recipes by part --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe, quantized",
    [
        (["mxfp8_rceil"], {"attention.wq", "attention.wo", "moe.experts"}),
        (["experts=mxfp8_rceil"], {"moe.experts"}),
        (["linears=mxfp8_rceil"], {"attention.wq", "attention.wo"}),
        (["mxfp8_rceil", "linears=bf16"], {"moe.experts"}),
        (["re:.*wq=mxfp8_rceil:rule=floor"], {"attention.wq"}),
        (["bf16"], set()),
    ],
)
def test_recipes_go_to_the_parts_they_name(tmp_path, recipe, quantized):
    train(tmp_path, recipe=recipe, stats_every=1, steps=1)
    names = {line["name"].split(".", 2)[2] for line in metrics(tmp_path, "quantization")}
    assert names == quantized


def test_help_is_something_to_learn_from():
    text = run("train", "--help").stdout
    assert "Examples:" in text and "--resume" in text and "tiny: " in text and "[0.0005]" in text
    assert run("--help").returncode == 0 and "Exit codes" in run("--help").stdout
    done = run("trian")
    assert done.returncode == 2
