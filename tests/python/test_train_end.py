"""`moxie train`: evaluations during a run and at its end, and --resume of runs that are finished or nearly so."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from program import (
    checkpoints,
    command,
    forge,
    metrics,
    micro,
    run,
    train,
)


def result(out):
    return json.loads((out / "result.json").read_text())


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished / "run", tmp_path / "run")


def text_of(folder, count):
    (folder / "text").write_text("".join(chr(97 + i * i % 26) for i in range(count)))
    return [folder / "text"]


# ---- evaluations ------------------------------------------------------------------------------------------------------------


def test_the_last_evaluation_reads_more_than_those_on_the_way(tmp_path):
    done = train(tmp_path, eval_every=2, eval_windows=8, final_eval_windows=40)
    evaluations = metrics(tmp_path, "eval")
    assert [(line["step"], line["windows"], line.get("final", False)) for line in evaluations] == [
        (2, 8, False),
        (4, 8, False),
        (6, 8, False),
        (6, 40, True),
    ]
    assert result(tmp_path)["eval_loss"] == evaluations[-1]["loss"] != evaluations[-2]["loss"]
    assert result(tmp_path)["eval_windows"] == 40
    assert "held-out window 0/40" in done.stderr


def test_no_evaluation_reads_more_than_is_held_out(tmp_path):
    # 20000 bytes are 1249 windows of 16 bytes and the byte after each. A twentieth, rounded up, is held out: 63.
    train(tmp_path / "run", data=text_of(tmp_path, 20000), eval_every=6, eval_windows=10**9, final_eval_windows=10**9)
    on_the_way, last = metrics(tmp_path / "run", "eval")
    assert on_the_way["windows"] == last["windows"] == result(tmp_path / "run")["eval_windows"] == 63
    assert on_the_way["loss"] == last["loss"]


def test_an_evaluation_is_the_mean_over_its_windows_whatever_the_batch(tmp_path):
    flags = dict(lr=0, dtype="f32", recipe="bf16", balance="none", steps=1, final_eval_windows=10)
    losses = []
    for batch in (1, 4, 16):
        train(tmp_path / str(batch), batch=batch, **flags)
        losses.append(result(tmp_path / str(batch))["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)  # float32 sums in another order


def test_a_run_interrupted_in_its_last_evaluation_goes_on_with_it(tmp_path):
    flags = micro(tmp_path / "run", steps=1, save_every=0, held_out=0.5, final_eval_windows=10**6)
    child = subprocess.Popen(command("train", **flags), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in child.stderr:
        if "held-out window" in line:
            break
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130 and checkpoints(tmp_path / "run") == ["step-00000001.safetensors"]
    assert not (tmp_path / "run/result.json").exists()
    assert run("train", "--resume", out=tmp_path / "run").returncode == 0
    assert [line["loss"] for line in metrics(tmp_path / "run", "eval")] == [result(tmp_path / "run")["eval_loss"]]


# ---- runs that are finished -------------------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_says_so_prints_its_result_and_changes_nothing(copy):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    config = json.loads(before[copy / "config.json"])
    (copy / "config.json").write_text(json.dumps({**config, "save_weights": ""}))
    before[copy / "config.json"] = (copy / "config.json").read_bytes()
    done = run("train", "--resume", "--json", out=copy)
    assert done.returncode == 0 and "is finished" in done.stderr and "step 0/6" not in done.stderr
    assert json.loads(done.stdout) == result(copy)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_resume_of_a_finished_run_still_writes_its_weights(finished, copy, tmp_path):
    lines = (copy / "metrics.jsonl").read_bytes()
    done = run("train", "--resume", out=copy, save_weights=tmp_path / "w")
    assert done.returncode == 0 and "is finished" in done.stderr
    assert (tmp_path / "w").read_bytes() == (finished / "weights.safetensors").read_bytes()
    assert (copy / "metrics.jsonl").read_bytes() == lines
    (copy / "checkpoints/step-00000006.safetensors").unlink()
    done = run("train", "--resume", out=copy, save_weights=tmp_path / "other")
    assert done.returncode == 2 and "has no checkpoint of step 6" in done.stderr and not (tmp_path / "other").exists()


def test_a_finished_run_goes_on_with_more_steps_and_has_one_last_evaluation(copy):
    assert run("train", "--resume", out=copy, steps=8).returncode == 0
    (last,) = [line for line in metrics(copy, "eval") if line.get("final")]
    assert last["step"] == 8 == result(copy)["steps"] and last["loss"] == result(copy)["eval_loss"]


def test_a_run_that_was_killed_just_before_its_result_is_evaluated_once(copy):
    loss = result(copy)["eval_loss"]
    (copy / "result.json").unlink()
    assert run("train", "--resume", out=copy).returncode == 0
    assert result(copy)["eval_loss"] == loss
    assert [line["loss"] for line in metrics(copy, "eval")] == [loss]


# ---- runs of earlier versions -----------------------------------------------------------------------------------------------


def test_a_run_that_knew_no_last_evaluation_goes_on_as_it_was(tmp_path):
    train(tmp_path, steps=2, final_eval_windows=40)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("final_eval_windows")
    (tmp_path / "config.json").write_text(json.dumps(config))
    forge(tmp_path / "checkpoints/step-00000002.safetensors", lambda about: about["config"].pop("final_eval_windows"))
    assert run("train", "--resume", out=tmp_path, steps=4).returncode == 0
    assert result(tmp_path)["eval_windows"] == 8  # not given in the run's config, so as many as in other evaluations


def test_a_run_that_knew_no_kept_activations_goes_on_with_h(tmp_path):
    train(tmp_path, steps=2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("kept_activations") == "h"
    (tmp_path / "config.json").write_text(json.dumps(config))
    forge(tmp_path / "checkpoints/step-00000002.safetensors", lambda about: about["config"].pop("kept_activations"))
    assert run("train", "--resume", out=tmp_path, steps=4).returncode == 0


def test_h_in_fp8_changes_gradients_and_no_forward_pass(tmp_path):
    losses = {}
    for kept in ("h", "h_fp8"):
        train(tmp_path / kept, steps=3, kept_activations=kept)
        losses[kept] = [line["loss"] for line in metrics(tmp_path / kept, "step")]
    assert losses["h"][0] == losses["h_fp8"][0]
    assert losses["h"][2] != losses["h_fp8"][2] and abs(losses["h"][2] - losses["h_fp8"][2]) < 0.05


def test_a_checkpoint_that_does_not_say_how_the_data_was_split_is_refused_with_the_reason(tmp_path):
    train(tmp_path, steps=2)
    path = tmp_path / "checkpoints/step-00000002.safetensors"
    forge(path, lambda about: about["position"].update(data_fingerprint="0123456789abcdef"))
    done = run("train", "--resume", out=tmp_path, steps=4)
    assert done.returncode == 2 and str(path) in done.stderr and "did not note how it split the data" in done.stderr


def test_a_kill_in_the_last_evaluation_loses_no_step(tmp_path):
    flags = micro(tmp_path / "run", steps=3, save_every=0, held_out=0.5, final_eval_windows=10**6)
    child = subprocess.Popen(command("train", **flags), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in child.stderr:
        if "held-out window" in line:
            child.kill()
            break
    child.wait()
    assert checkpoints(tmp_path / "run") == ["step-00000003.safetensors"]


def test_a_last_step_that_breaks_the_model_leaves_a_line_and_no_checkpoint(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 300)
    train(tmp_path / "run", data=[tmp_path / "text"], lr=1000, warmup=0, clip=0, weight_decay=1000, steps=3, save_every=0, code=3)
    assert metrics(tmp_path / "run", "eval")[-1]["loss"] is None
    assert not checkpoints(tmp_path / "run")


def test_a_finished_run_that_is_resumed_leaves_weights_alone_unless_they_are_asked_for(tmp_path):
    weights = tmp_path / "weights"
    train(tmp_path / "run", steps=1, save_weights=weights)
    weights.write_text("something else")
    run("train", "--resume", out=tmp_path / "run")
    assert weights.read_text() == "something else"
    assert run("train", "--resume", out=tmp_path / "run", save_weights=weights).returncode == 0
    assert weights.stat().st_size > 10000


def test_a_finished_run_takes_no_fewer_steps(copy):
    shutil.rmtree(copy / "checkpoints")
    done = run("train", "--resume", out=copy, steps=5)
    assert done.returncode == 2 and "has taken 6 steps already, got 5" in done.stderr
    assert result(copy)["steps"] == 6


@pytest.mark.parametrize("make", (lambda path: path.symlink_to("elsewhere"), lambda path: os.mkfifo(path)))
def test_weights_take_the_place_of_nothing_but_a_file(tmp_path, make):
    make(tmp_path / "weights")
    done = train(tmp_path / "run", save_weights=tmp_path / "weights", code=1)
    assert "is no regular file" in done.stderr and not (tmp_path / "weights").is_file()


def test_weights_do_not_take_the_place_of_a_file_of_the_run(tmp_path):
    done = train(tmp_path / "run", save_weights=tmp_path / "run/config.json", code=2)
    assert "is a file of the run itself" in done.stderr


def test_what_runs_wrote_is_no_text(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 300)
    for name in ("a", "b"):
        done = train(tmp_path / "runs" / name, data=[tmp_path], steps=1)
        assert "in 1 files" in done.stderr
