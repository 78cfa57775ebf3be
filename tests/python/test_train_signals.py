"""`moxie train`: signals, closed pipes and terminals, kills at any moment and system call, several processes on one folder.

The suite takes a few of the kills. All of them (half an hour):
    MOXIE_KILLS=100 MOXIE_SYSCALLS=all python -m pytest -s tests/python/test_train_signals.py
"""

import collections
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from program import checkpoints, command, metrics, micro, run, train

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children must get SIGHUP even if these tests were started with it ignored
SIGNALS = [signal.SIGKILL, signal.SIGPIPE, signal.SIGHUP, signal.SIGTERM]
# One dense layer has few tensors, so a run makes few writes to interrupt.
SHORT = dict(layers=1, experts=0, top_k=None, steps=3, save_every=1, keep=1)


def wait_for_steps(out, count=1):
    while not (out / "metrics.jsonl").exists() or len(metrics(out, "step")) < count:
        time.sleep(0.02)


def start(out, stderr=subprocess.PIPE, **flags):
    return subprocess.Popen(command("train", **micro(out, **flags)), stderr=stderr, stdout=subprocess.DEVNULL, text=True)


def goes_on(out, steps):
    last = max(int(name[5:13]) for name in checkpoints(out))
    done = run("train", "--resume", out=out, steps=last + 2)
    assert done.returncode == 0 and f"resumed at step {last}" in done.stderr
    assert last >= steps


# ---- signals lose nothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGPIPE])
def test_a_signal_ends_a_run_as_ctrl_c_does(tmp_path, number):
    child = start(tmp_path, steps=100000, save_every=0)
    wait_for_steps(tmp_path)
    child.send_signal(number)
    message = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and "--resume --out" in message
    goes_on(tmp_path, 1)


def test_a_pipe_that_nobody_reads_ends_a_run_with_a_checkpoint(tmp_path):
    child = start(tmp_path, steps=100000, save_every=0)
    child.stderr.readline()
    child.stderr.close()
    assert child.wait(timeout=120) == 130
    goes_on(tmp_path, 1)


def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(tmp_path):
    flags = micro(tmp_path, steps=100000, save_every=0)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command("train")[0], command("train", **flags))
    while not (tmp_path / "metrics.jsonl").exists() or not metrics(tmp_path, "step"):
        os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    goes_on(tmp_path, 1)


def test_nohup_holds(tmp_path):
    flags = micro(tmp_path, steps=300, save_every=0)
    child = subprocess.Popen(
        command("train", **flags),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    wait_for_steps(tmp_path)
    child.send_signal(signal.SIGHUP)
    assert child.wait(timeout=120) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_is_answered(tmp_path, number):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a").write_text("to be or not to be, that is the question. " * 300)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nsleep 1\necho {text}\n")
    python.chmod(0o755)
    flags = {**micro(tmp_path / "run"), "data": None}
    child = subprocess.Popen(
        command("train", **flags), stderr=subprocess.PIPE, text=True, env={**os.environ, "MOXIE_PYTHON": str(python)}
    )
    while not (tmp_path / "asked").exists():
        time.sleep(0.01)
    child.send_signal(number)
    message = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and "interrupted before the first step; nothing was written" in message


def test_a_comparison_whose_terminal_is_closed_goes_on_later(tmp_path):
    flags = {**micro(tmp_path, recipe=None, layers=1, steps=100000, save_every=0), "recipes": ["bf16"], "seeds": 1}
    child = subprocess.Popen(command("compare", **flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / "bf16-seed1")
    child.send_signal(signal.SIGHUP)
    assert "moxie compare --resume" in child.communicate(timeout=60)[1] and child.returncode == 130
    assert checkpoints(tmp_path / "bf16-seed1")


# ---- kills ------------------------------------------------------------------------------------------------------------------


def whole_run(folder, **flags):
    train(folder / "whole", save_weights=folder / "whole.safetensors", **flags)
    return (folder / "whole.safetensors").read_bytes(), json.loads((folder / "whole/result.json").read_text())["eval_loss"]


def ends_the_same(folder, expected, **flags):
    """Resumes the interrupted run (or starts it, if it had not begun) and asserts that it gives the expected weights, loss and
    steps."""
    out, weights = folder / "run", folder / "w"
    begun = any((out / name).exists() for name in ("config.json", "metrics.jsonl"))
    done = (
        run("train", "--resume", out=out, save_weights=weights)
        if begun
        else run("train", **micro(out, save_weights=weights, **flags))
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "edited" in line or "unchecked" in line or "no run writes" in line]
    assert not said
    result = json.loads((out / "result.json").read_text())
    assert (weights.read_bytes(), result["eval_loss"]) == expected
    assert [line["step"] for line in metrics(out, "step")] == list(range(1, result["steps"] + 1))
    assert not [path for path in out.rglob("*") if path.name.endswith(".unfinished")]
    shutil.rmtree(out)
    weights.unlink()


def test_a_signal_at_any_moment_changes_no_byte(tmp_path):
    flags = dict(steps=60, save_every=3)
    expected = whole_run(tmp_path, **flags)
    rng, ends = random.Random(2), collections.Counter()
    for index in range(int(os.environ.get("MOXIE_KILLS", "4"))):
        number = SIGNALS[index % len(SIGNALS)]
        child = start(tmp_path / "run", save_weights=tmp_path / "w", **flags)
        time.sleep(rng.uniform(0.05, 0.9))
        child.send_signal(number)
        child.communicate(timeout=60)
        ends[number.name, child.returncode] += 1
        # A signal that comes before the program has set its handlers ends it by default.
        assert child.returncode in (0, 130, -number)
        ends_the_same(tmp_path, expected, **flags)
    print(dict(ends))


strace = pytest.mark.skipif(not shutil.which("strace"), reason="there is no strace")
CALLS = ["write", "pwrite64", "fsync", "rename", "unlink"]


def calls_of(log):
    """Counts the system calls of the process's first thread by name, from strace's log."""
    lines = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    first = lines[0][0]
    return collections.Counter(text.split("(")[0] for pid, text in lines if pid == first and re.match(r"\w+\(", text))


@strace
def test_a_signal_at_any_system_call_changes_no_byte(tmp_path):
    expected = whole_run(tmp_path, **SHORT)
    line = command("train", **micro(tmp_path / "run", save_weights=tmp_path / "w", **SHORT))
    traced = subprocess.run(
        ["strace", "-f", "-o", tmp_path / "log", "-e", "trace=" + ",".join(CALLS), *line], capture_output=True
    )
    if traced.returncode != 0:
        pytest.skip("strace cannot trace here")
    counts = calls_of(tmp_path / "log")
    places = [(call, n, number) for call in CALLS for n in range(1, counts[call] + 1) for number in SIGNALS]
    assert len(places) > 100
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "w").unlink()
    if os.environ.get("MOXIE_SYSCALLS") != "all":
        places = random.Random(3).sample(places, int(os.environ.get("MOXIE_SYSCALLS", "4")))
    ends = collections.Counter()
    for call, n, number in places:
        done = subprocess.run(
            [
                "strace",
                "-f",
                "-o",
                "/dev/null",
                "-e",
                f"trace={call}",
                "-e",
                f"inject={call}:signal={number.name}:when={n}",
                *line,
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        ends[number.name, done.returncode] += 1
        assert done.returncode in (0, 130, -number, 128 + number), (call, n, number, done.stderr)
        try:
            ends_the_same(tmp_path, expected, **SHORT)
        except AssertionError as error:
            raise AssertionError(f"{number.name} at {call} {n}: {error}") from error
    print(dict(counts), len(places), dict(ends))


# ---- several processes on one folder ----------------------------------------------------------------------------------------


def test_a_folder_without_its_lock_file_is_still_that_of_one_process(tmp_path):
    child = start(tmp_path, steps=100000, save_every=0)
    wait_for_steps(tmp_path)
    (tmp_path / "lock").unlink()
    done = run("train", "--resume", out=tmp_path)
    child.terminate()
    child.communicate(timeout=60)
    assert done.returncode == 2 and "another process trains in this folder" in done.stderr
    assert child.returncode == 130
    goes_on(tmp_path, 1)


def test_a_run_whose_folder_is_moved_writes_into_no_other(tmp_path):
    child = start(tmp_path / "run", steps=100000, save_every=0)
    wait_for_steps(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    train(tmp_path / "run", steps=2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    child.terminate()
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 1 and "moved or replaced" in said
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@strace
@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("how", ["fresh", "resumed"])
def test_of_several_processes_on_one_folder_one_trains_and_the_others_say_why(tmp_path, count, how):
    flags = dict(steps=300, save_every=50)
    expected = whole_run(tmp_path, **flags)
    line = command("train", **micro(tmp_path / "run", save_weights=tmp_path / "w", **flags))
    if how == "resumed":
        child = start(tmp_path / "run", save_weights=tmp_path / "w", **flags)
        wait_for_steps(tmp_path / "run")
        child.terminate()
        child.communicate()
        line = command("train", "--resume", out=tmp_path / "run", save_weights=tmp_path / "w")
    rng = random.Random(count)
    delays = [rng.randrange(300_000) for _ in range(count)]
    children = [
        subprocess.Popen(
            ["strace", "-f", "-o", "/dev/null", "-e", "trace=flock", "-e", f"inject=flock:delay_enter={delay}", *line],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for delay in delays
    ]
    said = [child.communicate(timeout=120)[1] for child in children]
    trained = [text for text in said if " parameters on cpu" in text and "is finished" not in text]
    assert len(trained) == 1, said
    for child, text in zip(children, said):
        if text is trained[0]:
            assert child.returncode == 0
        elif child.returncode == 0:  # this process began after the run was finished
            assert "is finished" in text
        else:
            assert child.returncode == 2
            assert "another process trains in this folder" in text or "holds a run already" in text
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert ((tmp_path / "w").read_bytes(), result["eval_loss"]) == expected
    assert [step["step"] for step in metrics(tmp_path / "run", "step")] == list(range(1, 301))


@strace
@pytest.mark.parametrize("how", ["fresh", "resumed"])
def test_a_folder_is_judged_after_it_is_locked(tmp_path, how):
    """A process is stopped when it has opened the lock file, until another has run from start to end in the folder."""
    out = tmp_path / "run"
    line = command("train", **micro(out))
    if how == "resumed":
        train(out, steps=4)
        line = command("train", "--resume", out=out, steps=6)
    inject = ["-P", out / "lock", "-e", "trace=openat", "-e", "inject=openat:signal=SIGSTOP:when=1"]
    tracer = subprocess.Popen(
        ["strace", "-f", "-o", tmp_path / "log", *inject, *line], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while tracer.poll() is None and not ((tmp_path / "log").exists() and "stopped by SIGSTOP" in (tmp_path / "log").read_text()):
        time.sleep(0.02)
    if tracer.poll() is not None:
        pytest.skip("strace cannot trace here")
    subprocess.run(line, check=True, capture_output=True)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    stopped = int((tmp_path / "log").read_text().split()[0])
    os.kill(stopped, signal.SIGCONT)
    said = tracer.communicate(timeout=120)[1]
    assert tracer.returncode == (2 if how == "fresh" else 0)
    assert ("holds a run already" if how == "fresh" else "is finished") in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
