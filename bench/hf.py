#!/usr/bin/env python3
"""Measures stock models of transformers, forward + backward: with its own experts and with Moxie's, eager and compiled.

    bench/hf.py [--models mixtral qwen3] [--device cpu|cuda] [--quick] [--only NAME ...] [--out file.json]

Each line runs in a process of its own, so that a failure or lack of memory affects no other line, and peaks of memory are the
line's own. Writes JSON after each line, and prints a table of all lines last: ms (median), the peak of memory, and for each side
the better of eager and compiled over the best of transformers in bf16.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
import traceback

import harness  # before torch

# isort: split
import torch

BATCH, LENGTH, LAYERS = 8, 4096, {"mixtral": 2, "qwen3": 4}
QUICK = (2, 32)  # batch and length
# name of the line: (experts_implementation of transformers, recipe that quantize_ converts to; None: not converted)
LINES = {
    "grouped_mm": ("grouped_mm", None),
    "sonicmoe": ("sonicmoe", None),
    "moxie bf16": ("moxie", None),
    "seams mxfp8": ("grouped_mm", "mxfp8_rceil_128"),
    "moxie mxfp8": ("moxie", "mxfp8_rceil_128"),
}
STOCK = ("grouped_mm",)
LIMIT_SECONDS = 900  # for one line of the table: torch.compile may take minutes


def config_of(model: str, quick: bool):
    from transformers import MixtralConfig, Qwen3MoeConfig

    layers = LAYERS[model]
    if model == "mixtral":
        small = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
        return MixtralConfig(num_hidden_layers=layers, num_experts_per_tok=2, **(small if quick else {}))
    large = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32, head_dim=128)
    small = dict(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_attention_heads=4, head_dim=16, vocab_size=64
    )
    experts = dict(num_experts=8 if quick else 128, num_experts_per_tok=2 if quick else 8)
    return Qwen3MoeConfig(
        num_hidden_layers=layers,
        num_key_value_heads=2 if quick else 4,
        decoder_sparse_step=1,
        **experts,
        **(small if quick else large),
    )


def measure(options: argparse.Namespace) -> dict:
    """Measures the line that --line names: the seconds of each step, and the peak of memory."""
    from transformers import AutoModelForCausalLM

    import moxie
    import moxie.hf

    model_name, line, mode = options.line
    implementation, recipe = LINES[line]
    device = options.device
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(model_name, options.quick), dtype=torch.bfloat16, experts_implementation=implementation
        )
    model.to(device)  # buffers, too
    converted = [] if recipe is None else moxie.quantize_(model, recipe).converted
    call = torch.compile(model) if mode == "compiled" else model
    batch, length = QUICK if options.quick else (BATCH, LENGTH)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    for _ in range(harness.WARM_UP + 1):
        loss = step()
    result: dict = {"loss": float(loss), "converted": len(converted)}
    if recipe is not None:
        result["missing"] = moxie.participation(model).missing
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.repetitions):
        seconds += harness.laps([step], device)
        if device == "cuda":
            torch.cuda.synchronize()
    result |= {"seconds": seconds, "ms": 1e3 * statistics.median(seconds)}
    if device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def run_apart(arguments: list[str], line: tuple[str, str, str]) -> dict:
    """Runs this program with --line in a process of its own, and returns what it measured, or its error."""
    command = [sys.executable, __file__, *arguments, "--line", *line]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=LIMIT_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"error": f"no result in {LIMIT_SECONDS} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "wall_s": round(time.perf_counter() - start, 1)}


def table(results: list[dict]) -> str:
    rows = ["model    line          mode      ms        peak GiB  loss"]
    for one in results:
        name = f"{one['model']:8} {one['line']:13} {one['mode']:9} "
        peak = f"{one['peak_gib']:8.1f}" if "peak_gib" in one else "       -"
        rows.append(name + (one["error"] if "error" in one else f"{one['ms']:9.1f} {peak}  {one['loss']:.4f}"))
    rows += ["", "best of eager and compiled, over the best of transformers:"]
    for model in dict.fromkeys(one["model"] for one in results):
        best: dict[str, dict] = {}
        for one in results:
            if one["model"] == model and "ms" in one and one["ms"] < best.get(one["line"], {"ms": float("inf")})["ms"]:
                best[one["line"]] = one
        if not all(line in best for line in STOCK):
            continue
        stock = best[STOCK[0]]
        for line, one in best.items():
            peak = f", peak {one['peak_gib'] / stock['peak_gib']:.2f}x" if "peak_gib" in one else ""
            rows.append(f"  {model:8} {line:13} {stock['ms'] / one['ms']:.2f}x ({one['mode']}){peak}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, repetitions=8)
    parser.add_argument("--models", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--only", nargs="+", choices=tuple(LINES), default=list(LINES), help="these lines")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--line", nargs=3, help=argparse.SUPPRESS)  # model, line, mode: measure only this, in this process
    options = harness.parse_options(parser)
    if options.line:
        try:
            print(json.dumps(measure(options)))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    passed = ["--device", options.device, "--repetitions", str(options.repetitions)] + (["--quick"] if options.quick else [])
    out = options.out or harness.ROOT / "build" / f"hf-{options.device}.json"
    results: list[dict] = []
    for model in options.models:
        for line in options.only:
            for mode in options.modes:
                result = {"model": model, "line": line, "mode": mode, **run_apart(passed, (model, line, mode))}
                results.append(result)
                print(table([result]).splitlines()[1], flush=True)
                pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
                pathlib.Path(out).write_text(json.dumps({"command": sys.argv, "results": results}, indent=1))
    print(f"\n{table(results)}\n\nwritten to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
