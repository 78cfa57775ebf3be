"""`moxie train` and `moxie compare`: which folders they accept, which files they overwrite, and that no file can crash them."""

import json
import os
import shutil
import struct
import subprocess
import time

import pytest

from program import checkpoints, checksum, command, forge, micro, run, train


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished / "run", tmp_path / "run")


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def edit(path, change):
    json_of = json.loads(path.read_text())
    change(json_of)
    path.write_text(json.dumps(json_of))


# ---- a run is one thing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field, value", [("lr", 0.4), ("seed", 3), ("recipe", ["bf16"]), ("clip", 1.0000001)])
def test_a_config_that_is_not_the_checkpoints_is_refused(copy, field, value):
    edit(copy / "config.json", lambda config: config.update({field: value}))
    before = snapshot(copy)
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 2 and f'"{field}" is' in done.stderr and "edited or damaged" in done.stderr
    assert snapshot(copy) == before


def test_what_a_resumed_run_may_change_is_said(copy):
    edit(copy / "config.json", lambda config: config.update(final_eval_windows=4))
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 0 and '"final_eval_windows" is 4' in done.stderr


@pytest.mark.parametrize("gone", [["config.json"], ["config.json", "metrics.jsonl", "result.json"]])
def test_checkpoints_without_a_config_are_a_run_and_are_not_written_over(copy, gone):
    for name in gone:
        (copy / name).unlink()
    before = snapshot(copy)
    assert "holds a run already" in train(copy, code=2).stderr
    done = run("train", "--resume", out=copy)
    assert done.returncode == 2 and "without its config.json" in done.stderr
    assert snapshot(copy) == before


def test_the_checkpoint_to_go_on_from_is_chosen_by_the_step_inside(copy):
    (copy / "checkpoints/step-00000006.safetensors").rename(copy / "checkpoints/step-1.safetensors")
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 0 and "resumed at step 6" in done.stderr and "whatever its name says" in done.stderr
    assert "step-1.safetensors" in checkpoints(copy)  # runs do not give checkpoints this name, so none removes it


def test_an_older_checkpoint_with_a_later_name_is_not_gone_on_from(copy):
    (copy / "checkpoints/step-00000004.safetensors").rename(copy / "checkpoints/step-1.safetensors")
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 0 and "resumed at step 6" in done.stderr and "holds step 4" in done.stderr


def test_an_edited_result_is_refused_and_can_be_had_again(copy):
    loss = json.loads((copy / "result.json").read_text())["eval_loss"]
    edit(copy / "result.json", lambda result: result.update(eval_loss=1.5))
    done = run("train", "--resume", out=copy)
    assert done.returncode == 2 and "is not what the run wrote" in done.stderr and "evaluates again" in done.stderr
    (copy / "result.json").unlink()
    assert run("train", "--resume", out=copy).returncode == 0
    assert json.loads((copy / "result.json").read_text())["eval_loss"] == loss


def test_edited_metrics_are_noticed(copy):
    text = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(text.replace('"loss":5', '"loss":4', 1))
    done = run("train", "--resume", out=copy)
    assert done.returncode == 0 and "is not what the run wrote up to step 6" in done.stderr


def test_a_comparison_takes_no_run_of_another_plan(tmp_path):
    flags = {**micro(tmp_path, recipe=None, layers=1, steps=2, save_every=0), "recipes": ["bf16", "mxfp8_rceil"], "seeds": 1}
    assert run("compare", **flags).returncode == 0
    edit(tmp_path / "plan.json", lambda plan: plan["config"].update(lr=0.4005))
    done = run("compare", "--resume", out=tmp_path, seeds=2)
    assert done.returncode == 2 and "has --lr 0.003" in done.stderr and "has 0.4005" in done.stderr


def test_a_comparison_takes_no_edited_result(tmp_path):
    flags = {**micro(tmp_path, recipe=None, layers=1, steps=2, save_every=0), "recipes": ["bf16"], "seeds": 1}
    assert run("compare", **flags).returncode == 0
    edit(tmp_path / "bf16-seed1/result.json", lambda result: result.update(eval_loss=1.5))
    done = run("compare", "--resume", out=tmp_path)
    assert done.returncode == 2 and "is not what the run wrote" in done.stderr


@pytest.mark.parametrize("name", ["checkpoints/step-00000006.safetensors", "checkpoints/new", "lock"])
def test_weights_hit_no_file_of_the_run(copy, name):
    before = snapshot(copy)
    done = run("train", "--resume", out=copy, save_weights=copy / name)
    assert done.returncode == 2 and "is a file of the run itself" in done.stderr
    assert snapshot(copy) == before


def test_a_folder_does_not_say_which_files_are_written_outside_of_it(copy, tmp_path):
    edit(copy / "config.json", lambda config: config.update(save_weights=str(tmp_path / "mine")))
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 0 and not (tmp_path / "mine").exists()
    assert "outside of the run's folder" in done.stderr and "--save-weights" in done.stderr
    edit(copy / "config.json", lambda config: config.update(save_weights=str(copy / "w")))
    assert run("train", "--resume", out=copy, steps=10).returncode == 0 and (copy / "w").exists()


def test_no_checkpoint_is_written_through_a_link(copy, tmp_path):
    shutil.move(copy / "checkpoints", tmp_path / "elsewhere")
    (copy / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path / "elsewhere")
    done = run("train", "--resume", out=copy, steps=12)
    assert done.returncode == 1 and "it is a link" in done.stderr and snapshot(tmp_path / "elsewhere") == before


def test_a_finished_run_that_goes_on_keeps_its_result_until_there_is_a_new_one(copy):
    old = (copy / "result.json").read_text()
    child = subprocess.Popen(command("train", "--resume", out=copy, steps=100000), stderr=subprocess.DEVNULL)
    while len(checkpoints(copy)) < 3 or max(checkpoints(copy)) < "step-00000008":
        time.sleep(0.02)
    child.kill()
    child.wait()
    assert (copy / "result.json").read_text() == old
    newest = max(int(name[5:13]) for name in checkpoints(copy) if name.endswith(".safetensors"))
    done = run("train", "--resume", "--json", out=copy, steps=newest + 1)
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == newest + 1
    assert json.loads((copy / "result.json").read_text())["steps"] == newest + 1


def test_a_file_of_the_users_beside_the_weights_survives(tmp_path):
    (tmp_path / "w.unfinished").write_text("mine")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/w.unfinished").write_text("mine")
    train(tmp_path / "run", steps=2, save_weights=tmp_path / "w")
    assert (tmp_path / "w").stat().st_size > 10000
    for name in ("w.unfinished", "run/checkpoints/w.unfinished"):
        assert (tmp_path / name).read_text() == "mine"


def test_no_weights_are_written_through_a_link(copy, tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "w.unfinished").symlink_to(tmp_path / "target")
    assert run("train", "--resume", out=copy, save_weights=tmp_path / "w").returncode == 0
    assert (tmp_path / "w").stat().st_size > 10000 and (tmp_path / "target").read_text() == "mine"


# ---- no file brings it down -------------------------------------------------------------------------------------------------


DEEP = "[" * 200000 + "]" * 200000


@pytest.mark.parametrize("line", ["[" * 200000, DEEP, '{"step":1,"final":' + DEEP + "}"], ids=["open", "closed", "field"])
def test_brackets_without_end_in_metrics_are_no_crash(copy, line):
    with open(copy / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 0 and "1 lines that no run writes" in done.stderr


@pytest.mark.parametrize("deep", ["[" * 200000, DEEP], ids=["open", "closed"])
def test_brackets_without_end_in_a_checkpoint_are_no_crash(copy, deep):
    path = copy / "checkpoints/step-00000006.safetensors"
    forge(path, lambda about: about.update(config="DEEP"))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].replace(b'\\"DEEP\\"', deep.encode())
    data = struct.pack("<Q", len(header)) + header + data[8 + length :]
    at = data.index(b'"moxie.checksum": "') + len(b'"moxie.checksum": "')
    path.write_bytes(data[:at] + checksum(data[:at] + b"0" * 16 + data[at + 16 :]) + data[at + 16 :])
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 2 and "nested too deeply" in done.stderr and str(path) in done.stderr
    assert run("inspect", path, "--json").returncode == 0


def test_a_pattern_of_parentheses_is_no_crash(tmp_path):
    done = train(tmp_path / "run", recipe="re:" + "(" * 60000 + "=bf16", code=2)
    assert "longer than 1000 characters" in done.stderr and len(done.stderr) < 1000


def test_what_files_say_is_no_command_for_the_terminal(copy):
    forge(
        copy / "checkpoints/step-00000006.safetensors",
        lambda about: about["position"].update(data_fingerprint="split2-\x1b[2J\x9b31m"),
    )
    shown = [run("train", "--resume", out=copy, steps=8).stderr]
    for flags in ([], ["--json"]):
        done = run("inspect", copy / "checkpoints/step-00000006.safetensors", *flags)
        shown += [done.stdout, done.stderr]
    edit(copy / "config.json", lambda config: config.update(title="\x1b]0;mine\x07"))
    shutil.rmtree(copy / "checkpoints")
    (copy / "result.json").unlink()
    done = run("train", "--resume", out=copy, steps=8)
    assert done.returncode == 0 and "?]0;mine?" in done.stderr
    (copy / "checkpoints/step-\x1b[2J.safetensors").write_text("x")
    done = run("train", "--resume", out=copy, steps=10)
    assert done.returncode == 2 and "step-?[2J.safetensors" in done.stderr
    for text in [*shown, done.stderr, done.stdout]:
        assert not [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]


def peak_memory(*args):
    child = subprocess.Popen(command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = child.stderr.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * 1024, said


def test_an_odd_header_does_not_copy_the_tensor(tmp_path):
    rows, cols = 1 << 17, 1024
    count = 8 * rows * cols  # 1 GiB of zeros, as a sparse file: far more than what an allocator may keep of the pieces
    peaks = []
    for odd in (0, 1):
        header = json.dumps({"a": {"dtype": "F64", "shape": [rows, cols], "data_offsets": [0, count]}})
        header += " " * (-len(header) % 8 + odd)
        with open(tmp_path / "x", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header.encode())
            file.truncate(8 + len(header) + count)
        code, peak, said = peak_memory("inspect", tmp_path / "x", "--recipes", "bf16")
        assert code == 0, said
        peaks.append(peak)
    assert peaks[1] < peaks[0] + count // 2  # unaligned data is copied piece by piece, not as a whole


def test_a_header_of_nothing_takes_little_memory(tmp_path):
    header = b'{"a":[' + b"[]," * (33 << 20) + b"[]]}"
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header)
    code, peak, said = peak_memory("inspect", tmp_path / "x")
    assert peak < 1 << 30
    assert code == 2 and "values" in said


def test_text_in_more_files_than_a_process_may_map_is_read(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(66000):
        (tmp_path / "text" / str(i)).write_text(str(100000 + i))
    assert "of text in 66000 files" in train(tmp_path / "run", data=[tmp_path / "text"], steps=1).stderr


def test_tensors_are_measured_in_pieces_and_not_where_one_would_be_too_large(tmp_path):
    for cols, is_measured in ((1 << 16, True), ((1 << 16) + 1, False)):
        header = json.dumps({"a": {"dtype": "F32", "shape": [128, cols], "data_offsets": [0, 512 * cols]}})
        with open(tmp_path / "x", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header.encode())
            file.truncate(8 + len(header) + 512 * cols)
        code, peak, said = peak_memory("inspect", tmp_path / "x")
        assert code == 0 and peak < 1 << 30, said
        assert ("No tensor was measured" in run("inspect", tmp_path / "x").stdout) != is_measured
