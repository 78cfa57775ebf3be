"""`moxie train` with bad input, damaged files, full disks and closed outputs: each time a message says what is wrong, and nothing
is lost."""

import json
import os
import shutil
import subprocess
import time

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


@pytest.mark.parametrize(
    "flags, message",
    [
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
        (dict(kept_activations="none"), "--kept-activations must be one of h, h_fp8, got 'none'"),
        (dict(data=["no/such/folder"]), "--data: there is no 'no/such/folder'"),
        (dict(data=["/dev/null"]), "/dev/null"),
        (dict(final_eval_windows=0), "--final-eval-windows must be 1 to 1e+09, got 0"),
        (dict(save_weights="no/such/folder/w"), "cannot write 'no/such/folder/w': No such file or directory"),
        (dict(save_weights="/tmp"), "cannot write '/tmp': Is a directory"),
        (dict(config="no/such/file"), "cannot open 'no/such/file': No such file or directory"),
        (dict(init="no/such/file"), "cannot open 'no/such/file'"),
    ],
)
def test_bad_input_says_what_is_wrong_and_leaves_no_run_behind(tmp_path, flags, message):
    done = run("train", **micro(tmp_path / "run", **flags))
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"dim": 32', "is no JSON"),
        ('{"dmi": 32}', "there is no field \"dmi\"; did you mean 'dim'?"),
        ('{"dim": "32"}', '"dim" must be an integer, got "32"'),
        ('{"recipe": "bf16"}', '"recipe" must be a list of texts'),
        ('{"preset": "huge"}', "--preset must be one of tiny"),
        ("[1]", "must be an object of fields"),
    ],
)
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


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(window=-1), "its step or window is none"),
        (dict(window=2**63 - 5), "its step or window is none"),
        (dict(step=1.5), "its step or window is none"),
        (dict(step=-3), "its step or window is none"),
    ],
)
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
    for changed in ("to be or not to be, that is the question. " * 301, "to be or not to bee that is the question. " * 300):
        text.write_text(changed)
        done = run("train", "--resume", out=tmp_path / "run", steps=6)
        assert done.returncode == 2 and "the data is not what it was" in done.stderr


def test_a_file_that_is_named_twice_is_read_once(tmp_path):
    (tmp_path / "notes").mkdir()
    for name in "ab":
        (tmp_path / "notes" / name).write_text(f"to be or not to be, {name} is the question. " * 300)
    once = train(tmp_path / "once", data=[tmp_path / "notes"]).stderr
    twice = train(tmp_path / "twice", data=[tmp_path / "notes", tmp_path / "notes/a", tmp_path / "notes/../notes"]).stderr
    assert "of text in 2 files" in once and "of text in 2 files" in twice
    losses = [[line["loss"] for line in metrics(tmp_path / name, "step")] for name in ("once", "twice")]
    assert losses[0] == losses[1]


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
        command("train", **micro(tmp_path / "run", data=[text], steps=100000)), stderr=subprocess.PIPE, text=True
    )
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
