"""`moxie train`: what a run promises, tried on the program itself with a model that trains in a second."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch

from program import ROOT, command, forge, metrics, micro, read_tensors, run, train, write_tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing interrupted, and its weights."""
    folder = tmp_path_factory.mktemp("finished")
    train(folder / "run", save_weights=folder / "weights.safetensors", stats_every=2)
    return folder


def checkpoints(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


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
    assert sum(losses[-10:]) / 10 < 3.4 < losses[0]  # uniform bytes are 5.5 nats, the frequencies of bytes alone about 3.4


def test_it_starts_from_the_same_weights_on_every_device(finished, tmp_path, device):
    train(tmp_path, device=device, recipe=["mxfp8_rceil"])
    here, on_cpu = (metrics(out, "step")[0]["loss"] for out in (tmp_path, finished / "run"))
    assert here == pytest.approx(on_cpu, rel=2**-8)  # a loss near log 256, whatever bf16 does to the small logits
    assert json.loads((tmp_path / "result.json").read_text())["device"].startswith(device)


def test_expert_load_and_quantization_error_are_in_the_metrics(finished):
    out = finished / "run"
    loads = metrics(out, "load")
    assert {line["name"] for line in loads} == {"layers.0.moe", "layers.1.moe"}
    assert all(sum(line["counts"]) == 4 * 16 * 2 for line in loads)  # windows x tokens x top_k
    losses = metrics(out, "quantization")
    assert {line["name"] for line in losses} == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("attention.wq", "attention.wo", "moe.experts")}
    assert {line["tensor"] for line in losses if line["name"] == "layers.0.moe.experts"} == {
        "x", "w13", "h", "w2", "dh", "dy"}
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

    out, rng, kills, start = tmp_path / "killed", random.Random(1), 0, command("train", **micro(
        tmp_path / "killed", save_weights=tmp_path / "weights.safetensors", **flags))
    resume = command("train", "--resume", out=out)
    last_checkpoint = 0
    while kills < 20:
        child = subprocess.Popen(
            resume if (out / "config.json").exists() else start, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        # From before the first step to well into the run; later kills fall on a run that is further along.
        time.sleep(rng.uniform(0.05, 1.2))
        child.send_signal(signal.SIGKILL)
        message = child.communicate()[1]
        assert child.returncode in (0, -signal.SIGKILL), message
        kills += 1
        found = [int(name[5:13]) for name in checkpoints(out) if name.endswith(".safetensors")] if (out / "checkpoints").exists() else []
        assert max(found, default=0) >= last_checkpoint
        last_checkpoint = max(found, default=0)
        if child.returncode == 0:  # it was faster: the next kills fall on a run from the start again
            assert weights_of(tmp_path) == expected
            subprocess.run(["rm", "-r", out, tmp_path / "weights.safetensors"], check=True)
            last_checkpoint = 0
    done = run("train", "--resume", out=out) if (out / "config.json").exists() else subprocess.run(start)
    assert done.returncode == 0
    assert weights_of(tmp_path) == expected
    assert [line["step"] for line in metrics(out, "step")] == list(range(1, 61))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_a_checkpoint_and_goes_on_where_it_was(tmp_path, number):
    flags = dict(steps=400, save_every=0)
    child = subprocess.Popen(
        command("train", **micro(tmp_path / "run", **flags)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        # Sums of 64 losses in another order, in float32; AdamW's first steps may turn a rounding of a gradient near 0 into one of lr.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


# ---- weights in and out -----------------------------------------------------------------------------------------------------


def test_weights_go_out_and_come_in_unchanged(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    train(tmp_path / "a", balance="none", save_weights=first)
    train(tmp_path / "b", balance="none", init=first, lr=0, steps=1, save_weights=second, seed=9)
    assert first.read_bytes() == second.read_bytes()
    # A checkpoint is taken too, and a file somebody else wrote.
    train(tmp_path / "c", balance="none", init=tmp_path / "a/checkpoints/step-00000006.safetensors", lr=0, steps=1,
          save_weights=second)
    assert first.read_bytes() == second.read_bytes()
    write_tensors(tmp_path / "plain.safetensors", read_tensors(first))
    train(tmp_path / "d", balance="none", init=tmp_path / "plain.safetensors", lr=0, steps=1, save_weights=second)
    assert first.read_bytes() == second.read_bytes()


def test_weights_are_named_as_the_model_names_them(finished):
    tensors = read_tensors(finished / "weights.safetensors")
    assert tensors["embed"].shape == (256, 32) and tensors["layers.1.moe.experts.w13"].shape == (4, 64, 32)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


@pytest.mark.parametrize("change, message", [
    (lambda tensors: tensors.pop("head"), "has no tensor 'head'"),
    (lambda tensors: tensors.update(head=torch.zeros(256, 31)), "tensor 'head' must be [256, 32], got [256, 31]"),
    (lambda tensors: tensors.update(extra=torch.zeros(1)), "the model has no tensor 'extra'"),
    (lambda tensors: tensors.update(head=torch.zeros(256, 32, dtype=torch.int64)), "must have a float dtype, got I64"),
])
def test_weights_that_do_not_fit_are_refused(finished, tmp_path, change, message):
    tensors = read_tensors(finished / "weights.safetensors")
    change(tensors)
    write_tensors(tmp_path / "w.safetensors", tensors)
    done = train(tmp_path / "run", init=tmp_path / "w.safetensors", code=2)
    assert message in done.stderr


# ---- a loss that is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, message", [
    (float("nan"), "the weight layers.1.moe.experts.w13 is not finite, first in expert 2"),
    (1e38, "the output of layers.1.moe is not finite, first in expert 2"),
])
def test_the_watch_names_the_layer_and_the_expert(finished, tmp_path, value, message):
    tensors = read_tensors(finished / "weights.safetensors")
    tensors["layers.1.moe.experts.w13"][2, :, :] = value
    tensors["layers.1.moe.router.gate.weight"].zero_()  # with this bias every token goes to experts 2 and 3
    tensors["layers.1.moe.router.bias"] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    write_tensors(tmp_path / "w.safetensors", tensors)
    done = train(tmp_path / "stop", init=tmp_path / "w.safetensors", code=3)
    assert message in done.stderr and "step 1" in done.stderr
    done = train(tmp_path / "skip", init=tmp_path / "w.safetensors", on_nan="skip", recipe="bf16")
    assert message in done.stderr
    assert len(metrics(tmp_path / "skip", "not_finite")) == 6


def test_the_watch_follows_gradients_back_to_where_they_broke(tmp_path):
    # Steps this long make the last layer's weights so large that gradients overflow there; the embedding's do too, later.
    done = train(tmp_path, lr=30, warmup=0, clip=0, weight_decay=100, steps=12, code=3)
    assert "the gradient of layers.1." in done.stderr


def test_a_last_step_that_breaks_the_model_is_noticed(tmp_path):
    flags = dict(lr=1000, warmup=0, clip=0, weight_decay=1000, steps=3)
    done = train(tmp_path / "stop", code=3, **flags)
    assert "step 3: the held-out loss is not finite: " in done.stderr
    assert not (tmp_path / "stop/result.json").exists()
    done = train(tmp_path / "skip", on_nan="skip", **flags)
    assert json.loads((tmp_path / "skip/result.json").read_text())["eval_loss"] is None


# ---- recipes by part --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe, quantized", [
    (["mxfp8_rceil"], {"attention.wq", "attention.wo", "moe.experts"}),
    (["experts=mxfp8_rceil"], {"moe.experts"}),
    (["linears=mxfp8_rceil"], {"attention.wq", "attention.wo"}),
    (["mxfp8_rceil", "linears=bf16"], {"moe.experts"}),
    (["re:.*wq=mxfp8_rceil:rule=floor"], {"attention.wq"}),
    (["bf16"], set()),
])
def test_recipes_go_to_the_parts_they_name(tmp_path, recipe, quantized):
    train(tmp_path, recipe=recipe, stats_every=1, steps=1)
    names = {line["name"].split(".", 2)[2] for line in metrics(tmp_path, "quantization")}
    assert names == quantized


# ---- what goes wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, message", [
    (dict(dim="many"), "--dim must be an integer, got 'many'"),
    (dict(dim=0), "--dim must be 1 to 65536, got 0"),
    (dict(heads=3, kv_heads=2), "--heads must be a multiple of --kv-heads, got 3 and 2"),
    (dict(head_dim=3), "--head-dim must be even"),
    (dict(top_k=5), "--top-k must be at most --experts, got 5 and 4"),
    (dict(lr="nan"), "--lr must be 0 to 1000, got nan"),
    (dict(recipe="mxfp9"), "mxfp9"),
    (dict(recipe="expert=mxfp8_rceil"), "expert"),
    (dict(recipe="experts="), "--recipe must be NAME or PART=NAME"),
    (dict(preset="tny"), "did you mean 'tiny'?"),
    (dict(score="relu"), "--score must be one of softmax, sigmoid, got 'relu'"),
    (dict(data=["/no/such/folder"]), "--data: there is no '/no/such/folder'"),
    (dict(data=["/dev/null"]), "/dev/null"),
    (dict(eval_windows=2), "--eval-windows must be at least --batch"),
    (dict(config="/no/such/file"), "cannot open '/no/such/file': No such file or directory"),
    (dict(init="/no/such/file"), "cannot open '/no/such/file'"),
])
def test_bad_input_says_what_is_wrong_and_leaves_no_run_behind(tmp_path, flags, message):
    done = run("train", **micro(tmp_path / "run", **flags))
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("text, message", [
    ('{"dim": 32', "is no JSON"),
    ('{"dmi": 32}', "there is no field \"dmi\"; did you mean 'dim'?"),
    ('{"dim": "32"}', '"dim" must be an integer, got "32"'),
    ('{"recipe": "bf16"}', '"recipe" must be a list of texts'),
    ('{"preset": "huge"}', "--preset must be one of tiny"),
    ("[1]", "must be an object of fields"),
])
def test_bad_config_files_are_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    done = run("train", config=tmp_path / "config.json", out=tmp_path / "run")
    assert done.returncode == 2 and message in done.stderr


def test_a_config_file_is_over_the_preset_and_flags_are_over_it(tmp_path):
    train(tmp_path / "a")
    done = run("train", config=tmp_path / "a/config.json", out=tmp_path / "b", steps=2)
    assert done.returncode == 0
    a, b = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert {key for key in a if a[key] != b[key]} == {"steps", "out"}


def test_a_folder_with_a_run_is_not_written_over(finished):
    before = (finished / "run" / "metrics.jsonl").read_bytes()
    done = train(finished / "run", code=2)
    assert "holds a run already; --resume continues it" in done.stderr
    assert (finished / "run" / "metrics.jsonl").read_bytes() == before


def test_resume_refuses_what_would_make_another_run_of_it(finished):
    done = run("train", "--resume", out=finished / "run", lr=1)
    assert done.returncode == 2 and "--lr is not what the run" in done.stderr
    done = run("train", "--resume", out=finished / "nothing")
    assert done.returncode == 2 and "holds no run" in done.stderr
    done = run("train", "--resume", out=finished / "run", preset="small")
    assert done.returncode == 2 and "--preset must be tiny, what the run began with, got small" in done.stderr
    (finished / "other.json").write_text('{"dim": 64}')
    done = run("train", "--resume", out=finished / "run", config=finished / "other.json")
    assert done.returncode == 2 and "--dim is not what the run" in done.stderr
    done = run("train", "--resume", out=finished / "run", steps=4)
    assert done.returncode == 2 and "has taken 6 steps already, got 4" in done.stderr


def test_resume_needs_the_first_weights_no_more(finished, tmp_path):
    shutil.copy(finished / "weights.safetensors", tmp_path / "w.safetensors")
    train(tmp_path / "run", init=tmp_path / "w.safetensors", steps=2)
    (tmp_path / "w.safetensors").unlink()
    assert run("train", "--resume", out=tmp_path / "run", steps=4).returncode == 0


def test_progress_goes_into_no_file_where_stdout_and_stderr_are_closed(tmp_path):
    subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command("train", **micro(tmp_path))], check=True)
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]


def test_a_result_that_cannot_be_printed_is_an_error(finished):
    with open("/dev/full", "w") as full:
        done = subprocess.run(command("inspect", finished / "weights.safetensors"), stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and b"cannot write to stdout" in done.stderr


@pytest.mark.parametrize("change, message", [
    (dict(window=-1), "its step or window is none"),
    (dict(window=2**63 - 5), "its step or window is none"),
    (dict(step=1.5), "its step or window is none"),
    (dict(step=-3), "its step or window is none"),
])
def test_a_checkpoint_forged_with_a_right_checksum_is_refused(tmp_path, change, message):
    train(tmp_path, steps=2)
    path = tmp_path / "checkpoints/step-00000002.safetensors"
    forge(path, lambda about: about["position"].update(change))
    done = run("train", "--resume", out=tmp_path, steps=4)
    assert done.returncode == 2 and message in done.stderr and str(path) in done.stderr


def test_resume_refuses_data_that_changed(tmp_path):
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 300)
    train(tmp_path / "run", data=[text], steps=4)
    text.write_text("to be or not to be, that is the question! " * 301)
    done = run("train", "--resume", out=tmp_path / "run", steps=6)
    assert done.returncode == 2 and "the data is not what it was" in done.stderr


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_still_serves(tmp_path):
    train(tmp_path, steps=4)
    newest = tmp_path / "checkpoints/step-00000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    done = run("train", "--resume", out=tmp_path, steps=6)
    assert done.returncode == 2 and str(newest) in done.stderr
    newest.unlink()
    done = run("train", "--resume", out=tmp_path, steps=6)
    assert done.returncode == 0 and "resumed at step 2" in done.stderr


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path):
    train(tmp_path, steps=2)
    kept = (tmp_path / "checkpoints/step-00000002.safetensors").read_bytes()
    done = run("train", "--resume", out=tmp_path, steps=6, file_limit=len(kept) // 2)
    assert done.returncode == 1 and "cannot write" in done.stderr and "File too large" in done.stderr
    assert (tmp_path / "checkpoints/step-00000002.safetensors").read_bytes() == kept
    assert checkpoints(tmp_path) == ["step-00000002.safetensors"]
    assert run("train", "--resume", out=tmp_path, steps=6).returncode == 0


def test_data_that_is_cut_short_under_a_run_ends_it_with_a_message_and_loses_nothing(tmp_path):
    text = tmp_path / "text"
    words = "to be or not to be, that is the question. " * 3000
    text.write_text(words)
    child = subprocess.Popen(
        command("train", **micro(tmp_path / "run", data=[text], steps=100000)), stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run/checkpoints").exists() or not checkpoints(tmp_path / "run"):
        time.sleep(0.02)
    os.truncate(text, 0)
    _, message = child.communicate(timeout=60)
    assert child.returncode == 1 and "a file became shorter" in message
    text.write_text(words)
    last = int(max(name for name in checkpoints(tmp_path / "run") if name.endswith(".safetensors"))[5:13])
    done = run("train", "--resume", out=tmp_path / "run", steps=last + 2)
    assert done.returncode == 0 and f"resumed at step {last}" in done.stderr


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    child = subprocess.Popen(command("train", **micro(tmp_path, steps=100000)), stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.02)
        done = run("train", "--resume", out=tmp_path)
        assert done.returncode == 2 and "another process trains in this folder" in done.stderr
    finally:
        child.kill()
        child.wait()


def test_help_is_something_to_learn_from():
    text = run("train", "--help").stdout
    assert "Examples:" in text and "--resume" in text and "tiny: " in text and "[0.001]" in text
    assert run("--help").returncode == 0 and "Exit codes" in run("--help").stdout
    done = run("trian")
    assert done.returncode == 2
