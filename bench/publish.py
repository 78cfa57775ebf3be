#!/usr/bin/env python3
"""Puts the committed results into the documents: tables between their markers, and the picture.

    bench/publish.py [--check]     --check changes nothing and fails if a table is not what the results say

A figure in a document is never typed.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CPU, GPU = "intel-xeon-processor-2-threads", "nvidia-h200"
PICTURES = ROOT / "docs" / "pictures"
END = "<!-- /numbers -->"


def source(report: dict) -> str:
    return f"`{report['command']}`, commit `{report['commit'][:10]}`."


def about(report: dict) -> str:
    machine = report["machine"]
    return f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}, {report['date'][:10]}"


def ops_table(report: dict) -> str:
    lines = [
        f"{about(report)}: a copy of 1 GiB "
        f"moves {report['copy']['gb_per_s']:.1f} GB/s. Median of {report['repetitions']}, {source(report)}",
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


def grouped_mm_table(report: dict) -> str:
    on_gpu = report["machine"]["name"].startswith("NVIDIA")
    onednn = "" if on_gpu else f", oneDNN up to {report['machine']['onednn_max_isa']}"
    lines = [
        f"{about(report)}{onednn}. Median of {report['repetitions']}, {source(report)}",
        "",
        "| | M x N x K, groups | forward ms | backward ms | both ms | of bf16 |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        *sizes, groups = row["shape"]
        name = row["name"] if " " in row["name"] else f"`{row['name']}`"
        ms = " | ".join(f"{row[part]['median'] * 1e3:.1f}" for part in ("forward_seconds", "backward_seconds", "seconds"))
        lines.append(f"| {name} | {' x '.join(map(str, sizes))}, {groups} {row['groups']} | {ms} | {row['times_bf16']:.2f}x |")
    return "\n".join(lines)


def sqnr_table(report: dict) -> str:
    *sizes, groups = report["shape"]
    kept = [f"x kept, {rows} rows in {count} groups" for rows, count in report["memory"]]
    lines = [
        f"M x N x K = {' x '.join(map(str, sizes))}, {groups} ragged groups, {report['machine']['name']}, {source(report)}",
        "",
        f"| recipe | y, dB | dx, dB | dw, dB | {' | '.join(kept)} |",
        "|---|" + "--:|" * (3 + len(kept)),
    ]
    for row in report["rows"]:
        cells = [f"{row[name]:.1f}" for name in ("y", "dx", "dw")] + [f"{share:.2f}" for share in row["kept_of_bf16"]]
        lines.append(f"| `{row['recipe']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def convergence_table(report: dict) -> str:
    lines = [
        f"{report['machine']['name']}, {report['date'][:10]}, {source(report)}",
        "",
        "| recipe | held-out loss | bf16's | bigram entropy | difference | 95 % interval | `--require 1 --require-learned` |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in report["rows"]:
        lines.append(f"| `{row['recipe']}` | {row['eval_loss']:.4f} | {row['base_eval_loss']:.4f} | {row['bigram_entropy']:.4f} | "
                     f"{row['difference_percent']:+.2f} % | {row['interval_percent'][0]:+.2f} % to {row['interval_percent'][1]:+.2f} % | "
                     f"{'passes' if row['passes'] else 'fails'} |")
    return "\n".join(lines)


def curves_table(report: dict) -> str:
    steps = report["curves"][0]["steps"]
    lines = [f"{report['machine']['name']}, {report['date'][:10]}, {source(report)}", "",
             f"| held-out loss, mean of 3 seeds, after | {' | '.join(f'{step} steps' for step in steps)} |", "|---|" + "--:|" * len(steps)]
    for row in report["curves"]:
        for device, name in (("cpu", "a CPU"), ("cuda", "the GPU")):
            lines.append(f"| `{row['recipe']}` on {name} | {' | '.join(f'{loss:.3f}' for loss in row[device])} |")
    deviation = [max(row["seed_deviation"][i] for row in report["curves"]) for i in range(len(steps))]
    lines.append(f"| standard deviation between seeds | {' | '.join(f'{value:.3f}' for value in deviation)} |")
    return "\n".join(lines)


# (page, name in its marker, file of the results, table of them)
TABLES = [
    ("README.md", "cpu", f"{CPU}/ops.json", ops_table),
    ("README.md", "grouped_mm", f"{CPU}/grouped_mm.json", grouped_mm_table),
    ("README.md", "grouped_mm_gpu", f"{GPU}/grouped_mm.json", grouped_mm_table),
    ("docs/COMPARE.md", "convergence", f"{CPU}/convergence.json", convergence_table),
    ("docs/COMPARE.md", "curves", f"{GPU}/convergence.json", curves_table),
    ("docs/RECIPES.md", "sqnr", f"{CPU}/sqnr.json", sqnr_table),
]


def with_table(text: str, name: str, table: str) -> str:
    begin = f"<!-- numbers:{name}, written by bench/publish.py -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{END}{rest.split(END, 1)[1]}"


def pages() -> dict[pathlib.Path, str]:
    """Every page as it should be."""
    texts = {}
    for page, name, results, table in TABLES:
        path = ROOT / page
        report = RESULTS / results
        content = table(json.loads(report.read_text())) if report.exists() else "Not measured yet."
        texts[path] = with_table(texts.get(path) or path.read_text(), name, content)
    return texts


def draw(report: dict, shape: list[int], where: str, name: str) -> None:
    """One picture: the ops on tokens of this shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # (Where a launch takes longer than the op, as route's do, a rate says nothing.)
    rows = [row for row in report["rows"]
            if row["shape"] == shape and "swizzled" not in row["variant"] and row["op"] != "route"]
    names = [f"{row['op']}  {row['variant']}" for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.3))
    bars = axes.barh(names, [row["gb_per_s"] for row in rows], color="#3b6ea8", height=0.65)
    axes.bar_label(bars, [f"{row['gb_per_s']:.{1 if row['gb_per_s'] < 1000 else 0}f}" for row in rows], padding=4, fontsize=9)
    axes.axvline(report["copy"]["gb_per_s"], color="#444444", linestyle="--", linewidth=1)
    axes.text(report["copy"]["gb_per_s"], -0.9, " a copy", color="#444444", fontsize=9, va="center")
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, each tensor counted once")
    axes.set_title(f"{' x '.join(map(str, shape))} in {rows[0]['num_groups']} ragged groups, {where}",
                   fontsize=11, loc="left", pad=16)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / name, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the documents are up to date")
    check = parser.parse_args().check
    stale = [(path, text) for path, text in pages().items() if text != path.read_text()]
    if check:
        for path, _ in stale:
            print(f"{path.relative_to(ROOT)} does not show what bench/results says: run bench/publish.py", file=sys.stderr)
        return 1 if stale else 0
    for path, text in stale:
        path.write_text(text)
    of_cpu, of_gpu = (json.loads((RESULTS / folder / "ops.json").read_text()) for folder in (CPU, GPU))
    draw(of_cpu, of_cpu["rows"][0]["shape"], f"{of_cpu['machine']['threads']} CPU threads", "ops-cpu.png")
    draw(of_gpu, [131072, 7168], of_gpu["machine"]["name"], "ops-h200.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
