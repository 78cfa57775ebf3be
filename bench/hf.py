#!/usr/bin/env python3
"""Measures stock models of transformers, forward + backward: with its own experts and with Moxie's, eager and compiled.

    bench/hf.py [--models mixtral qwen3] [--device cpu|cuda] [--quick] [--only NAME ...] [--modes eager compiled] [--jobs 1]
                [--out file.json]

Mixtral-8x7B and Qwen3-30B-A3B, cut to a few layers; the vocabulary is cut by the same factor, so that the head has the share of a
step that it has in the whole model. Each line runs in a process of its own, so that a failure or lack of memory affects no other
line, and peaks of memory are the line's own. --jobs processes build and compile their models at the same time; then each in turn
measures alone. Writes JSON after each line, and prints a table at the end.
"""

import argparse
import functools
import itertools
import json
import sys
import traceback

import harness  # before torch

# isort: split
import torch

from apart import Child, in_batches, wait_for_turn
from hf_tables import STOCK, best_of

BATCH, LENGTH = 8, 4096
QUICK = (2, 32)  # batch and length
LAYERS = {"mixtral": (2, 32), "qwen3": (4, 48)}  # that are measured, and those of the whole model
VOCABULARY = {"mixtral": 32000, "qwen3": 151936}  # of the whole model
# name of the line: (experts_implementation of transformers, recipe that quantize_ converts to; None: not converted)
LINES = {
    "grouped_mm": ("grouped_mm", None),
    "sonicmoe": ("sonicmoe", None),
    "moxie bf16": ("moxie", None),
    "seams mxfp8": ("grouped_mm", "mxfp8_rceil_128"),
    "moxie mxfp8": ("moxie", "mxfp8_rceil_128"),
    "moxie mxfp8, w not kept": ("moxie", "mxfp8_rceil_128:keep_w=false"),
}


def config_of(model: str, quick: bool):
    from transformers import MixtralConfig, Qwen3MoeConfig

    layers, whole = LAYERS[model]
    # Rounded to 64, which the products with the head prefer.
    common = dict(num_hidden_layers=layers, vocab_size=64 if quick else VOCABULARY[model] * layers // whole // 64 * 64)
    if model == "mixtral":
        small = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
        return MixtralConfig(num_experts_per_tok=2, **common, **(small if quick else {}))
    large = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32, head_dim=128)
    small = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_attention_heads=4, head_dim=16)
    return Qwen3MoeConfig(
        num_key_value_heads=2 if quick else 4,
        decoder_sparse_step=1,
        num_experts=8 if quick else 128,
        num_experts_per_tok=2 if quick else 8,
        **common,
        **(small if quick else large),
    )


def measure(options: argparse.Namespace) -> dict:
    """Measures the line that --line names: the seconds of a step, and the peak of memory."""
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

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    for _ in range(harness.WARM_UP):
        loss = step()
    result: dict = {"loss": float(loss), "converted": len(converted)}
    if recipe is not None:
        result["missing"] = moxie.participation(model).missing
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.empty_cache()  # for the processes beside this one
    wait_for_turn()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = [lap for _ in range(options.repetitions) for lap in harness.laps([step], device)]
    result["seconds"] = harness.spread(seconds)
    if device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def result_of(child: Child) -> dict:
    try:
        return json.loads(child.finish().strip().splitlines()[-1])
    except RuntimeError as error:
        return {"error": str(error)}


def table(results: list[dict]) -> str:
    lines = [("model", "line", "mode", "ms", "peak GiB", "loss", "times as fast", "peak of stock's")]
    best = {model: best_of(results, model) for model in LAYERS}
    for one in results:
        stock = best[one["model"]].get(STOCK)
        cells = [one.get("error", "")[:40], "", "", "", ""]
        if "seconds" in one:
            cells[:3] = f"{1e3 * one['seconds']['median']:.1f}", f"{one.get('peak_gib', 0.0):.2f}", f"{one['loss']:.4f}"
            if stock and one is best[one["model"]][one["line"]]:
                cells[3] = f"{stock['seconds']['median'] / one['seconds']['median']:.2f}"
                cells[4] = f"{one['peak_gib'] / stock['peak_gib']:.2f}" if "peak_gib" in one else ""
        lines.append((one["model"], one["line"], one["mode"], *cells))
    return harness.text_table(lines, left=3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, repetitions=8)
    parser.add_argument("--models", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--only", nargs="+", choices=tuple(LINES), default=list(LINES), help="these lines")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--jobs", type=int, default=1, help="processes that get ready at the same time")
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
    report = harness.begin_report("bench/hf.py", options)
    import transformers

    report |= {"transformers": transformers.__version__, "tokens": QUICK if options.quick else (BATCH, LENGTH), "layers": LAYERS}
    report["rows"] = []
    # Compiled lines first: they take longest to get ready, and then do so side by side.
    lines = sorted(itertools.product(options.models, options.only, options.modes), key=lambda line: line[2] != "compiled")
    start = lambda line: functools.partial(Child, __file__, *passed, "--line", *line)
    for line, child in zip(lines, in_batches([start(line) for line in lines], options.jobs)):
        report["rows"].append({**dict(zip(("model", "line", "mode"), line)), **result_of(child)})
        harness.write_report(report, options, "hf")
    print(f"{harness.about(report)}; median of {options.repetitions}\n{table(report['rows'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
