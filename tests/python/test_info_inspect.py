"""`moxie info` and `moxie inspect`: what they print, against the same figures from Python."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess

import pytest
import torch

import moxie
from support import random_values

# The program: MOXIE_CLI if it is set, else the one in the library's build folder.
LIBRARY = pathlib.Path(os.environ.get("MOXIE_LIBRARY", "build/cpu/moxie/torch/libmoxie_torch.so")).resolve()
BINARY = pathlib.Path(os.environ.get("MOXIE_CLI", LIBRARY.parents[2] / "bin" / "moxie"))

pytestmark = pytest.mark.skipif(not BINARY.is_file(), reason="the program moxie is not built")

WORDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint16: "U16",
    torch.complex64: "C64",
}


def run(*args, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    done = subprocess.run([str(BINARY), *map(str, args)], text=True, capture_output=True, env={**os.environ, **env})
    assert done.returncode == code, done.stderr
    return done


def run_json(*args, **env: str) -> dict:
    return json.loads(run(*args, "--json", **env).stdout)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def write(path: pathlib.Path, tensors: dict[str, torch.Tensor], metadata: dict | None = None, pad: bool = True) -> pathlib.Path:
    """Writes a safetensors file as other programs do: without a checksum and, unless `pad`, with unaligned data."""
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        raw = bytes_of(tensor)
        header[name] = {
            "dtype": WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8) if pad else b" " * (3 - len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def expected(w: torch.Tensor, recipe: str) -> dict:
    """Computes with Moxie's quantizers the figures that the program must print for a float tensor."""
    w = w.reshape(1, *w.shape) if w.dim() == 2 else w
    w = w if w.dtype in (torch.float32, torch.bfloat16) else w.float()
    fields = moxie.Recipe.from_name(recipe)
    if fields.scaling == "row":
        qdata, scale = moxie.quantize_per_row(w)
        decoded = qdata.float() * scale.unsqueeze(-1)
        exponents = torch.log2(scale)[(w != 0).any(-1)]
    else:
        qdata, scale = moxie.quantize_rowwise(w, block=fields.weights, rule=fields.rule)
        decoded = moxie.dequantize_rowwise(qdata, scale, block=fields.weights, dtype=torch.float32)
        codes = scale.view(torch.uint8)
        exponents = codes[codes > 0].float() - 127
    values, count = w.double(), w.numel()
    noise = (values - decoded.double()).square().sum()
    # An element was clipped if it became 448, the largest e4m3 value, although it was above 464 in units of the scale: such
    # values would round up to 480.
    clipped = (qdata.float().abs() == 448) & (values.abs() > decoded.double().abs() * (464 / 448))
    return {
        "sqnr_db": 10 * math.log10(values.square().sum() / noise) if noise else None,
        "flushed": ((values != 0) & (decoded == 0)).sum().item() / count,
        "clipped": clipped.sum().item() / count,
        "smallest_exponent": int(exponents.min()),
        "largest_exponent": int(exponents.max()),
    }


def assert_close(actual: dict, wanted: dict) -> None:
    assert actual.keys() == wanted.keys()
    assert actual["sqnr_db"] == pytest.approx(wanted["sqnr_db"], abs=1e-5)
    for key in wanted.keys() - {"sqnr_db"}:
        assert actual[key] == wanted[key], key


# ---- info ------------------------------------------------------------------------------------------------------------------


def test_info_says_what_this_build_and_machine_are():
    info = run_json("info")
    assert info["version"] == moxie.__version__
    assert info["torch"] == torch.__version__.split("+")[0]
    assert info["cuda"] is moxie.has_cuda()
    assert info["torch_cuda"] is (torch.version.cuda is not None)
    assert info["cpu"]["threads"] >= 1 and info["cpu"]["model"]
    assert info["cpu"]["instruction_set"] in ("baseline", "avx2", "avx512")
    text = run("info").stdout
    for part in (f"moxie {moxie.__version__}", f"torch {info['torch']}", info["cpu"]["model"]):
        assert part in text
    if not info["gpus"]:
        assert "none found: recipes run on the CPU" in text


def test_info_gives_the_kernels_of_every_recipe_and_the_reasons():
    info = run_json("info", "--n", 48, "--k", 64)
    assert (info["n"], info["k"]) == (48, 64)
    on_cpu = [row for row in info["recipes"] if row["device"] == "cpu"]
    assert [row["recipe"] for row in on_cpu] == moxie.recipe_names()
    for row in info["recipes"]:
        told = moxie.explain(row["recipe"], 48, 64, groups=8, device=row["device"])
        assert [passed.pop("pass") for passed in row["passes"]] == ["forward", "dgrad", "wgrad"]
        assert row["passes"] == [dataclasses.asdict(one) for one in (told.forward, told.dgrad, told.wgrad)]
    text = run("info").stdout
    for row in on_cpu:
        assert row["recipe"] in text and row["passes"][0]["kernel"] in text and row["passes"][0]["reason"] in text


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch would ask the driver that this test makes")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_info_names_a_gpu_that_it_cannot_use(tmp_path):
    source = tmp_path / "driver.c"
    source.write_text("""
        #include <string.h>
        int cuInit(unsigned flags) { return 0; }
        int cuDeviceGetCount(int* count) { *count = 2; return 0; }
        int cuDeviceGet(int* device, int index) { *device = index; return 0; }
        int cuDeviceGetName(char* name, int size, int device) { strcpy(name, device ? "Old GPU" : "New GPU"); return 0; }
        int cuDeviceTotalMem_v2(unsigned long* bytes, int device) { *bytes = 3ul << 30; return 0; }
        int cuDeviceGetAttribute(int* value, int which, int device) { *value = which == 75 ? 9 - device : 0; return 0; }
    """)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    info = run_json("info", LD_LIBRARY_PATH=str(tmp_path))
    assert [(gpu["name"], gpu["capability"]) for gpu in info["gpus"]] == [("New GPU", "9.0"), ("Old GPU", "8.0")]
    assert all(gpu["memory_bytes"] == 3 << 30 and gpu["why_not_used"] == "this torch has no CUDA" for gpu in info["gpus"])
    assert {row["device"] for row in info["recipes"]} == {"cpu"}
    text = run("info", LD_LIBRARY_PATH=str(tmp_path)).stdout
    assert "GPU 1 Old GPU: compute capability 8.0, 3.0 GiB; not used: this torch has no CUDA" in text


def test_info_refuses_sizes_that_are_none():
    for word in ("0", "-1", "many", ""):
        assert "--n" in run("info", "--n", word, code=2).stderr


# ---- inspect ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
def test_figures_are_those_of_the_quantizers(tmp_path, dtype):
    tensors = {
        "linear": random_values(200, 150, dtype=torch.float32),
        "experts": random_values(3, 70, 300, seed=1),
        "zeros": torch.zeros(4, 40),
        "flat": torch.full((130, 129), 0.5),
    }
    tensors["linear"][3] = 0
    tensors = {name: tensor.float().clamp(-6e4, 6e4).to(dtype) for name, tensor in tensors.items()}
    recipes = ["mxfp8_rceil", "mxfp8_floor", "mxfp8_rceil_128", "mxfp8_rceil_32x32", "fp8_rowwise"]
    seen = run_json("inspect", write(tmp_path / "x", tensors), "--recipes", *recipes)
    for tensor in seen["tensors"]:
        assert tensor["not_finite"] == 0
        assert list(tensor["recipes"]) == recipes
        for recipe in recipes:
            if tensor["name"] == "zeros":
                assert tensor["recipes"][recipe] == {
                    "sqnr_db": None,
                    "flushed": 0,
                    "clipped": 0,
                    "smallest_exponent": None,
                    "largest_exponent": None,
                }
            else:
                assert_close(tensor["recipes"][recipe], expected(tensors[tensor["name"]], recipe))


def test_defaults_and_the_total(tmp_path):
    a, b = random_values(64, 96, dtype=torch.float32), random_values(2, 32, 64, seed=1)
    seen = run_json("inspect", write(tmp_path / "x", {"a": a, "b": b, "bias": torch.ones(7)}))
    assert seen["total"]["tensors"] == 3 and seen["total"]["elements"] == a.numel() + b.numel() + 7
    assert seen["total"]["bytes"] == 4 * a.numel() + 2 * b.numel() + 28
    assert list(seen["total"]["recipes"]) == ["mxfp8_rceil", "mxfp8_rceil_128", "fp8_rowwise"]
    stats = sum(moxie.quantization_stats(w, recipe="mxfp8_rceil_128", part="w") for w in (a.unsqueeze(0), b))
    total = seen["total"]["recipes"]["mxfp8_rceil_128"]
    assert total["sqnr_db"] == pytest.approx(moxie.sqnr(stats).item())
    assert total["flushed"] == stats[2] / stats[4]


def test_a_tensor_is_the_same_in_pieces(tmp_path):
    # The program reads a tensor in pieces. The first shape is larger than a piece in its rows, the second in its groups.
    for shape in ((5000, 1000), (70, 300, 256)):
        w = random_values(*shape, dtype=torch.float32)
        path = tmp_path / "x"
        text = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 4 * w.numel()]}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + w.numpy().tobytes())
        seen = run_json("inspect", path)["tensors"][0]["recipes"]
        for recipe, quality in seen.items():
            assert_close(quality, expected(w, recipe))


def test_a_file_of_somebody_else(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "none3": torch.zeros(2, 0, 3, dtype=torch.float16),
        "ids": torch.arange(6),
        "mask": torch.ones(3, 3, dtype=torch.bool),
        "fp8": torch.ones(3, 5).to(torch.float8_e4m3fn),
        "u16": torch.ones(3, 4, dtype=torch.uint16),
        "complex": torch.ones(2, 2, dtype=torch.complex64),
        "four": torch.ones(1, 2, 3, 4),
        "w": random_values(33, 65, dtype=torch.float32),
        "wide": torch.full((1, 1), 0.3),
    }
    path = write(tmp_path / "x", tensors, metadata={"format": "pt", "odd\x1b[31m": "a\nb"}, pad=False)
    seen = run_json("inspect", path)
    by_name = {tensor["name"]: tensor for tensor in seen["tensors"]}
    assert by_name.keys() == tensors.keys()
    for name, tensor in tensors.items():
        about = by_name[name]
        assert about["shape"] == list(tensor.shape) and about["bytes"] == tensor.nbytes and about["dtype"] == WORDS[tensor.dtype]
        assert ("recipes" in about) == (name in ("w", "wide"))
    assert_close(by_name["w"]["recipes"]["mxfp8_rceil"], expected(tensors["w"], "mxfp8_rceil"))
    assert seen["has_checksum"] is False and seen["checkpoint"] is None
    assert seen["metadata"] == {"format": "pt", "odd\x1b[31m": "a\nb"}
    text = run("inspect", path).stdout
    assert "no checksum" in text and "format: pt" in text and "\x1b" not in text and "odd?[31m: a?b" in text


def test_values_that_are_not_finite_are_named(tmp_path):
    w = torch.ones(64, 64)
    w[3, 4], w[5, 6], w[7, 8] = math.nan, math.inf, -math.inf
    path = write(tmp_path / "x", {"w": w})
    tensor = run_json("inspect", path)["tensors"][0]
    assert tensor["not_finite"] == 3
    assert all(quality["sqnr_db"] is None for quality in tensor["recipes"].values())
    assert "w: 3 elements are not finite" in run("inspect", path).stdout


def test_values_of_f64_that_f32_cannot_hold_are_counted_and_not_called_infinite(tmp_path):
    w = random_values(64, 64, dtype=torch.float32).double()
    w[0, 0], w[1, 1], w[2, 2] = 1e300, 1e-300, 0
    path = write(tmp_path / "x", {"w": w})
    tensor = run_json("inspect", path)["tensors"][0]
    assert tensor["not_finite"] == 0 and tensor["outside_f32"] == 2
    text = run("inspect", path).stdout
    assert "w: 2 elements are outside of F32" in text and "not finite" in text and "nan" not in text
    w[0, 0], w[1, 1] = 1, 1
    tensor = run_json("inspect", write(tmp_path / "x", {"w": w}))["tensors"][0]
    assert tensor["outside_f32"] == 0
    assert_close(tensor["recipes"]["mxfp8_rceil"], expected(w, "mxfp8_rceil"))


def test_patterns_choose_tensors_and_adam_is_measured_only_if_named(tmp_path):
    tensors = {
        name: random_values(32, 32, seed=i)
        for i, name in enumerate(("model.layers.0.w1", "model.layers.1.w1", "adam.mean.layers.0.w1"))
    }
    path = write(tmp_path / "x", tensors)
    measured = {tensor["name"]: "recipes" in tensor for tensor in run_json("inspect", path)["tensors"]}
    assert measured == {"model.layers.0.w1": True, "model.layers.1.w1": True, "adam.mean.layers.0.w1": False}
    seen = run_json("inspect", path, "--tensor", "adam.*", "*.1.w?")
    assert {tensor["name"]: "recipes" in tensor for tensor in seen["tensors"]} == {
        "model.layers.1.w1": True,
        "adam.mean.layers.0.w1": True,
    }
    assert seen["total"]["tensors"] == 2
    error = run("inspect", path, "--tensor", "model.layers.0.w2", code=2).stderr
    assert "has no tensor 'model.layers.0.w2'; did you mean 'model.layers.0.w1'?" in error


def test_a_file_with_nothing_to_measure(tmp_path):
    text = run("inspect", write(tmp_path / "x", {"ids": torch.arange(6)})).stdout
    assert "No tensor was measured" in text
    assert run_json("inspect", write(tmp_path / "y", {}))["total"] == {"tensors": 0, "elements": 0, "bytes": 0}


def test_a_checkpoint_says_how_far_it_is(tmp_path):
    (tmp_path / "text").write_text("".join(chr(97 + i * i % 26) for i in range(20000)))
    sizes = {
        "dim": 32,
        "layers": 1,
        "heads": 2,
        "head-dim": 16,
        "experts": 4,
        "hidden-dim": 32,
        "seq-len": 16,
        "batch": 2,
        "eval-windows": 2,
        "steps": 2,
        "threads": 1,
    }
    run(
        "train",
        "--data",
        tmp_path / "text",
        "--out",
        tmp_path / "run",
        "--recipe",
        "mxfp8_rceil",
        *(word for name, value in sizes.items() for word in (f"--{name}", value)),
    )
    path = tmp_path / "run" / "checkpoints" / "step-00000002.safetensors"
    seen = run_json("inspect", path)
    assert seen["has_checksum"] is True
    assert seen["checkpoint"]["position"]["step"] == 2 and seen["checkpoint"]["position"]["window"] == 4
    assert seen["checkpoint"]["config"]["dim"] == 32
    names = {tensor["name"]: "recipes" in tensor for tensor in seen["tensors"]}
    assert any(name.startswith("model.") and measured for name, measured in names.items())
    assert not any(measured for name, measured in names.items() if not name.startswith("model."))
    text = run("inspect", path).stdout
    for part in ("checksum right", "step 2 of 2, 4 windows read", "recipe mxfp8_rceil, seed 1", "dim 32, 1 layers, 4 experts"):
        assert part in text
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    error = run("inspect", path, code=2).stderr
    assert "is damaged: its checksum is" in error and str(path) in error


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    for content in (b"", b"#!/bin/sh\n", struct.pack("<Q", 7) + b"[1,2,3]", struct.pack("<Q", 1 << 60) + b"{}"):
        (tmp_path / "x").write_bytes(content)
        done = run("inspect", tmp_path / "x", code=2)
        assert str(tmp_path / "x") in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert "No such file" in run("inspect", tmp_path / "absent", code=1).stderr
    assert "Is a directory" in run("inspect", tmp_path, code=1).stderr


def test_a_recipe_that_is_none_is_refused(tmp_path):
    path = write(tmp_path / "x", {"w": torch.ones(2, 2)})
    error = run("inspect", path, "--recipes", "mxfp4", code=2).stderr
    assert "there is no recipe 'mxfp4'" in error and "mxfp8_rceil_128" in error
    variant = "mxfp8_rceil_128:rule=floor"
    assert list(run_json("inspect", path, "--recipes", variant, "bf16")["total"]["recipes"]) == [variant, "bf16"]


@pytest.mark.parametrize("command", ("info", "inspect"))
def test_help_has_examples(command):
    text = run(command, "--help").stdout
    assert f"moxie {command}" in text and "--json" in text and f"docs/{command.upper()}.md" in text
    assert "inspect" in run("--help").stdout and "info" in run("--help").stdout
