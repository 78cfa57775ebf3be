#!/usr/bin/env python3
"""Trains every mixture-of-experts family of the installed transformers, tiny, and writes the table of docs/HUGGING_FACE.md.

    bench/families.py [--families mixtral ...] [--steps 40] [--seeds 3] [--print]

Losses are means of the last five steps, over the seeds; the scatter is the range of the unconverted model's over the seeds.
"""

import argparse
import pathlib
import re
import statistics
import sys
import warnings

import harness  # before torch

sys.path.insert(0, str(harness.ROOT / "tests" / "python"))

# isort: split
import torch

import hf_families
import moxie
import moxie.hf

PAGE = harness.ROOT / "docs" / "HUGGING_FACE.md"
MARKS = ("<!-- families -->\n", "<!-- end of families -->\n")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def train(family: str, way: str, dtype: torch.dtype, seed: int, steps: int) -> tuple[float, str]:
    """The mean loss of the last steps, and how many of the parameters of experts took part."""
    model = hf_families.build(family, dtype)
    if way == "moxie":
        if not model._can_set_experts_implementation():
            raise hf_families.NotBuiltError("its experts take no implementation")
        model.set_experts_implementation("moxie")
    if way != "stock":
        moxie.quantize_(model, "mxfp8_rceil")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = (torch.arange(32) + torch.randint(0, 11, (4, 1), generator=generator)).remainder(11) + 3
        loss = hf_families.loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    experts = hf_families.experts_of(model)
    part = moxie.participation(model)
    taken = len(set(experts) & set(part.forward) & set(part.backward))
    return statistics.mean(losses[-5:]), f"{taken} of {len(experts)}"


def row(family: str, options: argparse.Namespace) -> str:
    cells = [family]
    for name, dtype in DTYPES.items():
        stock: list[float] = []
        for way in ("stock", "seams", "moxie"):
            try:
                results = [train(family, way, dtype, seed, options.steps) for seed in range(options.seeds)]
            except Exception as error:
                cells.append(f"- ({type(error).__name__})")
                continue
            losses = [loss for loss, _ in results]
            mean = statistics.mean(losses)
            if way == "stock":
                stock = losses
                cells.append(f"{mean:.4f} ({max(stock) - min(stock):.4f})")
            else:
                difference = f"{mean - statistics.mean(stock):+.4f}" if stock else f"{mean:.4f}"
                cells.append(f"{difference}, {results[0][1]}")
        print(family, name, *cells[1:], flush=True)
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=hf_families.families())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--print", action="store_true", help="print the table and leave the page as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    heads = ["family", *(f"{name}, {way}" for name in DTYPES for way in ("loss (scatter)", "seams", "`moxie`"))]
    import transformers

    said = (
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, CPU, mxfp8_rceil, "
        f"{options.steps} steps, {options.seeds} seeds. Cells of Moxie: the difference of the loss, and the weights of experts "
        "that multiplied."
    )
    lines = [
        said,
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(row(family, options) for family in options.families),
    ]
    text = "\n".join(lines) + "\n"
    if options.print:
        print(text)
        return 0
    page = PAGE.read_text()
    inside = re.compile(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), re.DOTALL)
    pathlib.Path(PAGE).write_text(inside.sub(lambda _: MARKS[0] + text + MARKS[1], page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
