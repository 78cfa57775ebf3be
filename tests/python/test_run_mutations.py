"""Runs `moxie train --resume` in folders in which one file was changed, mostly so that its structure and checksum stay valid.

Resuming must fail with an error, print a note or give the same bytes; it must not crash, hang or take a gigabyte. The readers
alone are tested in the same way, with a thousand times as many cases, in tests/cli/run_mutations_test.cc.
MOXIE_PROGRAM_FUZZ_CASES is the number of folders (6); MOXIE_CLI may name a program that was built with MOXIE_SANITIZE.
"""

import collections
import json
import os
import random
import re
import shutil
import struct
import subprocess

from program import command, train, xxh3

STEPS = 8  # of the resumed run
ODD = [None, True, -1, 0, 1.5, 1e300, 2**64 - 1, "", "\x1b[2J", [], {}, ["bf16"], [[1]], "x" * 100000]
# Progress lines that every resumed run prints. Any other line counts as a note that something in the folder is wrong.
USUAL = re.compile(r"train(: .* parameters on |  (step|held-out window) \d)")


def near(rng, value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + rng.choice([-1, 1, 4]) if isinstance(value, int) else value * rng.choice([0.5, 1.0000001, 2])
    return value + rng.choice(["x", " "]) if isinstance(value, str) else rng.choice(ODD)


def change_field(rng, fields):
    key = rng.choice(list(fields))
    if isinstance(fields[key], dict) and fields[key] and rng.random() < 0.8:
        return change_field(rng, fields[key])
    how = rng.randrange(4)
    if how == 0:
        del fields[key]
    else:
        fields[key] = rng.choice(ODD) if how == 1 else near(rng, fields[key])


def changed_json(rng, data):
    fields = json.loads(data)
    change_field(rng, fields)
    return json.dumps(fields).encode()


def changed_lines(rng, data):
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    how = rng.randrange(4)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(at, rng.choice([b"[" * 200000 + b"\n", b"\n", rng.choice(lines)]))
    else:
        lines[at] = changed_json(rng, lines[at]) + b"\n"
    return b"".join(lines)


def changed_checkpoint(rng, data):
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    how = rng.randrange(4)
    if how == 0:
        rest[rng.randrange(len(rest))] ^= 1 << rng.randrange(8)
    elif how == 1:
        change_field(rng, header)
    else:
        about = json.loads(header["__metadata__"]["moxie.checkpoint"])
        change_field(rng, about)
        header["__metadata__"]["moxie.checkpoint"] = json.dumps(about)
    if "moxie.checksum" not in header.get("__metadata__", {}):
        return data[:8] + json.dumps(header).encode() + bytes(rest)
    header["__metadata__"]["moxie.checksum"] = "0" * 16
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(rest)
    at = data.index(b'"moxie.checksum": "') + len(b'"moxie.checksum": "')
    return data[:at] + xxh3(data).encode() + data[at + 16 :]


def changed_bytes(rng, data):
    data = bytearray(data)
    at = rng.randrange(len(data))
    how = rng.randrange(4)
    if how == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif how == 1:
        del data[at:]
    elif how == 2:
        del data[at : at + rng.randrange(1, 100)]
    else:
        data[at:at] = b"[" * 200000
    return bytes(data)


def change(rng, out):
    path = rng.choice(sorted(path for path in out.rglob("*") if path.is_file() and path.name != "lock"))
    data = path.read_bytes()
    how = (
        changed_bytes
        if rng.random() < 0.3
        else changed_json
        if path.suffix == ".json"
        else changed_lines
        if path.suffix == ".jsonl"
        else changed_checkpoint
    )
    path.write_bytes(how(rng, data))
    return f"{how.__name__} of {path.name}"


def resume(out, weights):
    child = subprocess.Popen(
        command("train", "--resume", out=out, steps=STEPS, save_weights=weights),
        stdout=subprocess.DEVNULL,
        stderr=open(out / "said", "w"),
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, (out / "said").read_text(errors="replace"), usage.ru_maxrss * 1024


def test_a_changed_file_is_refused_or_said_or_changes_no_byte(tmp_path):
    whole, weights = tmp_path / "whole", tmp_path / "w"
    train(whole, steps=4, layers=1)
    shutil.copytree(whole, tmp_path / "run")
    assert resume(tmp_path / "run", weights)[0] == 0
    expected, ends, most = weights.read_bytes(), collections.Counter(), 0
    first = int(os.environ.get("MOXIE_PROGRAM_FUZZ_FIRST", "0"))
    for case in range(first, first + int(os.environ.get("MOXIE_PROGRAM_FUZZ_CASES", "6"))):
        shutil.rmtree(tmp_path / "run")
        weights.unlink(missing_ok=True)
        shutil.copytree(whole, tmp_path / "run")
        what = change(random.Random(case), tmp_path / "run")
        code, said, memory = resume(tmp_path / "run", weights)
        most = max(most, memory)
        assert code in (0, 1, 2), (case, what, code, said)
        words = [line for line in said.splitlines() if not USUAL.match(line)]
        assert words or weights.read_bytes() == expected, (case, what)
        ends["refused" if code else "said" if words else "same"] += 1
    assert most < 1 << 30
    print(dict(ends), f"at most {most >> 20} MiB")
