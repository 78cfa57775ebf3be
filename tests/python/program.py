"""Runs the program `moxie` in tests, on a model so small that a run takes a second."""

import ctypes
import json
import os
import pathlib
import resource
import struct
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# The smallest sizes that are multiples of 32, the block of mxfp8_rceil.
MICRO = {
    "dim": 32,
    "layers": 2,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 16,
    "experts": 4,
    "hidden-dim": 32,
    "seq-len": 16,
    "batch": 4,
    "steps": 6,
    "lr": 3e-3,
    "warmup": 2,
    "eval-windows": 8,
    "final-eval-windows": 8,
    "eval-every": 0,
    "save-every": 2,
    "stats-every": 0,
    "threads": 1,
    "device": "cpu",
    "recipe": "mxfp8_rceil",
}


def program() -> pathlib.Path:
    """Returns the path of the program `moxie`: MOXIE_CLI if it is set, else the one in the library's build folder."""
    chosen = os.environ.get("MOXIE_CLI")
    if chosen:
        return pathlib.Path(chosen)
    path = pathlib.Path(os.environ["MOXIE_LIBRARY"]).resolve().parents[2] / "bin" / "moxie"
    if not path.exists():
        pytest.skip("the program moxie is not built")
    return path


def words(flags: dict) -> list[str]:
    """Turns flags into words of a command line: {"dim": 32, "recipe": ["a", "b"]} -> ["--dim", "32", "--recipe", "a", "b"]. A
    value of None leaves the flag out."""
    line = []
    for name, value in flags.items():
        if value is not None:
            line += ["--" + name] + [str(word) for word in (value if isinstance(value, list) else [value])]
    return line


def command(*args, **flags) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return [str(program()), *map(str, args), *words(named)]


def run(*args, file_limit: int | None = None, env: dict | None = None, **flags) -> subprocess.CompletedProcess:
    """Runs the program. `file_limit` is the largest size that a file may reach; writing more fails as on a full disk."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    return subprocess.run(
        command(*args, **flags),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
        preexec_fn=limit if file_limit else None,
    )


def micro(out: pathlib.Path, **flags) -> dict:
    """Returns the flags for training the micro model into the folder `out`, with `flags` changed. The data is this repository's
    docs."""
    base = {name.replace("-", "_"): value for name, value in MICRO.items()}
    return {**base, "data": [ROOT / "docs"], "out": out, **flags}


def train(out: pathlib.Path, *args, code: int = 0, **flags) -> subprocess.CompletedProcess:
    limits = {name: flags.pop(name) for name in ("file_limit", "env") if name in flags}
    done = run("train", *args, **limits, **micro(out, **flags))
    assert done.returncode == code, done.stderr
    return done


def metrics(out: pathlib.Path, event: str | None = None) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}


def read_tensors(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """Reads a safetensors file without Moxie's code, to check what Moxie wrote."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = torch.frombuffer(data[begin:end], dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def write_tensors(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file as other programs do, without Moxie's metadata."""
    header, data = {}, b""
    words_of = {dtype: word for word, dtype in DTYPES.items()}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": words_of[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def checksum(data: bytes) -> bytes:
    """Computes the checksum that checkpoints of format 1 carry, as moxie/cli/file/old_checksum.cc does."""
    odd, other, ones = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 2**64 - 1

    def rotate(x, count):
        return (x << count | x >> (64 - count)) & ones

    def mix(lane, word):
        return rotate(lane ^ (rotate(word * odd & ones, 31) * other & ones), 27) * odd & ones

    lanes = [1, 2, 3, 4]
    padded = data + bytes(32 - len(data) % 32)
    for i, word in enumerate(struct.unpack(f"<{len(padded) // 8}Q", padded)):
        lanes[i % 4] = mix(lanes[i % 4], word)
    total = len(data)
    for lane in lanes:
        total = mix(total, lane)
    return b"%016x" % mix(total, total >> 32)


def xxh3(data: bytes) -> str:
    """Computes a file's XXH3 checksum as metrics.jsonl records it, but with the xxhash library."""
    digest = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
    digest.argtypes, digest.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
    return f"{digest(data, len(data)):016x}"


LEDGER = ("checkpoint", "result")  # events in metrics.jsonl that record another file's checksum


def forget_checksums(out: pathlib.Path) -> None:
    """Removes the recorded checksums from metrics.jsonl, as in runs of older versions, which recorded none."""
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["event"] not in LEDGER))


def edit_result(out: pathlib.Path, **changed) -> None:
    """Changes fields of result.json and updates its checksum in metrics.jsonl, so that the change goes undetected."""
    text = json.dumps({**json.loads((out / "result.json").read_text()), **changed})
    (out / "result.json").write_text(text)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "result":
            line["checksum"] = xxh3(text.encode())
        if line.get("final") and "loss" in line:
            line["loss"] = changed.get("eval_loss", line["loss"])
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def forge(path: pathlib.Path, change) -> None:
    """Changes the metadata of a checkpoint of format 1 and recomputes its checksum, so that the checksum does not reveal the
    change."""
    forget_checksums(path.parent.parent)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["moxie.checkpoint"])
    change(about)
    header["__metadata__"].update({"moxie.checkpoint": json.dumps(about), "moxie.checksum": "0" * 16, "moxie.format": "1"})
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + data[8 + length :]
    at = data.index(b'"moxie.checksum": "') + len(b'"moxie.checksum": "')
    path.write_bytes(data[:at] + checksum(data) + data[at + 16 :])


def checkpoints(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())
