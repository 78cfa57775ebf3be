#!/usr/bin/env python3
"""Trains a tiny model of every mixture-of-experts family of transformers, and writes the table of docs/HUGGING_FACE.md.

    bench/families.py [--families mixtral ...] [--steps 40] [--seeds 3] [--slowest 0.5] [--print]

A family whose unconverted step takes longer than `slowest` seconds is not trained: the table names it, and how long it took.
A seed determines the initial weights and the data. Losses are means of the last five steps, over the seeds; the scatter is the
range of the unconverted model's over the seeds.
"""

import argparse
import pathlib
import re
import statistics
import sys
import time
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


class NoImplementationError(Exception):
    """The family has no experts whose implementation transformers lets a user choose."""


def train(family: str, way: str, dtype: torch.dtype, seed: int, steps: int) -> tuple[float, str]:
    """Trains one model; returns the mean loss of the last five steps, and "converted experts that multiplied of all".

    way: "stock", nothing is converted; "seams", quantize_ converts the parameters, and torch's products of them become Moxie's;
    "moxie", the same with moxie's implementation of the experts in transformers' registry.
    """
    model = hf_families.build(family, dtype, seed=seed)
    if way == "moxie":
        if not model._can_set_experts_implementation():
            raise NoImplementationError
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


def seconds_of_a_step(family: str) -> float:
    """The time of the unconverted model's second step; 0 if it fails, as train() then fails too, with the reason."""
    try:
        model, seconds = hf_families.build(family), 0.0
        for _ in range(2):
            began = time.monotonic()
            hf_families.loss_of(model, torch.arange(128).remainder(11).add(3).view(4, 32)).backward()
            seconds = time.monotonic() - began
        return seconds
    except Exception:
        return 0.0


def row(family: str, options: argparse.Namespace) -> str:
    cells = [family]
    seconds = seconds_of_a_step(family)
    if seconds > options.slowest:
        print(family, f"not trained: its step takes {seconds:.1f} s", flush=True)
        return f"| {family} | not trained: its unconverted step takes {seconds:.1f} s |{' |' * 5}"
    for name, dtype in DTYPES.items():
        stock: list[float] = []
        for way in ("stock", "seams", "moxie"):
            try:
                results = [train(family, way, dtype, seed, options.steps) for seed in range(options.seeds)]
            except NoImplementationError:
                cells.append("- (takes none)")
                continue
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


def summary(rows: list[str]) -> str:
    """The sentence above the table: how many families were trained, and in which of them a way changes the loss by more than
    seeds do.
    """
    trained, larger, cells_of_moxie = 0, [], 0
    for line in rows:
        family, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        trained += bool(re.match(r"\d", cells[0]))
        for at, name in ((0, "f32"), (3, "bf16")):
            scatter = re.search(r"\((\d+\.\d+)\)", cells[at])
            for cell, way in zip(cells[at + 1 : at + 3], ("seams", "`moxie`")):
                difference = re.match(r"[+-]\d+\.\d+", cell)
                if scatter is None or difference is None:
                    continue
                cells_of_moxie += 1
                if abs(float(difference[0])) > float(scatter[1]):
                    larger.append(f"{family} {name} {way}")
    where = f": {', '.join(larger)}" if larger else ""
    return (
        f"{trained} of {len(rows)} families trained. In {len(larger)} of {cells_of_moxie} cells the difference is larger than "
        f"the scatter{where}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=hf_families.families())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slowest", type=float, default=0.5, help="seconds of a step")
    parser.add_argument("--print", action="store_true", help="print the table and leave the page as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    heads = ["family", *(f"{name}, {way}" for name in DTYPES for way in ("loss (scatter)", "seams", "`moxie`"))]
    import transformers

    said = (
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, CPU, mxfp8_rceil, "
        f"{options.steps} steps, {options.seeds} seeds, of initial weights and data. The loss is the mean of the last five "
        "steps, the scatter its range over the seeds. Cells of Moxie: the difference of the loss, and the weights of experts "
        "that multiplied (0 of 0: experts that are no 3D parameters); takes none: its experts take no implementation. An error "
        "in the first column is that of the unconverted model as it is built here."
    )
    rows = [row(family, options) for family in options.families]
    lines = [
        said,
        "",
        summary(rows),
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *rows,
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
