#!/usr/bin/env python3
"""Puts the committed results into the README: the table between its markers, and the picture.

    bench/publish.py [--check]     --check changes nothing and fails if the table is not what the results say

Numbers in the README are never typed.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "intel-xeon-processor-2-threads" / "ops.json"
PICTURE = ROOT / "docs" / "pictures" / "ops-cpu.png"
BEGIN, END = "<!-- numbers:cpu, written by bench/publish.py -->", "<!-- /numbers -->"


def table(report: dict) -> str:
    machine = report["machine"]
    lines = [
        f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}, {report['date'][:10]}: a copy of 1 GiB "
        f"moves {report['copy']['gb_per_s']:.1f} GB/s. Median of {report['repetitions']}, "
        f"`{report['command']}`, commit `{report['commit'][:10]}`.",
        "",
        "| op | shape | ms | GB/s | of a copy | against torchao |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        if "swizzled" in row["variant"] or "f32" in row["variant"]:
            continue
        peer = f"{row['times_torchao']:.0f}x faster" if "times_torchao" in row else ""
        shape = " x ".join(map(str, row["shape"])) + (f", {row['num_groups']} groups" if row["num_groups"] else "")
        lines.append(f"| `{row['op']}` {row['variant']} | {shape} | {row['seconds']['median'] * 1e3:.1f} | "
                     f"{row['gb_per_s']:.1f} | {row['of_copy']:.0%} | {peer} |")
    return "\n".join(lines)


def draw(report: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if len(row["shape"]) == 2 and "swizzled" not in row["variant"]]
    names = [f"{row['op']}  {row['variant']}" for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.3))
    bars = axes.barh(names, [row["gb_per_s"] for row in rows], color="#3b6ea8", height=0.65)
    axes.bar_label(bars, [f"{row['gb_per_s']:.1f}" for row in rows], padding=4, fontsize=9)
    axes.axvline(report["copy"]["gb_per_s"], color="#444444", linestyle="--", linewidth=1)
    axes.text(report["copy"]["gb_per_s"], -0.9, " a copy", color="#444444", fontsize=9, va="center")
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, each tensor counted once")
    shape = " x ".join(map(str, rows[0]["shape"]))
    axes.set_title(f"{shape} in {rows[0]['num_groups']} ragged groups, {report['machine']['threads']} CPU threads",
                   fontsize=11, loc="left", pad=16)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the README is up to date")
    check = parser.parse_args().check
    report = json.loads(RESULTS.read_text())
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    text = f"{before}{BEGIN}\n{table(report)}\n{END}{after}"
    if check:
        if text != readme.read_text():
            print("README.md does not show what bench/results says: run bench/publish.py", file=sys.stderr)
            return 1
        return 0
    readme.write_text(text)
    draw(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
