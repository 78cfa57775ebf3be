#!/usr/bin/env python3
"""Writes the committed results into the documents: tables between their markers, and plots.

    bench/publish.py [--check]     --check changes nothing and fails if a table differs from the results

Figures in a document are never typed by hand.
"""

import argparse
import json
import pathlib
import sys

import engines_tables
import exchange_tables
import hf_tables
import moe_tables
from doc_tables import about, median_of, source, table_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CPU, GPU = "intel-xeon-processor-2-threads", "nvidia-h200"
EXCHANGE = "cost-model/exchange.json"  # computed, not measured: not in the folder of a machine
PICTURES = ROOT / "docs" / "pictures"
END = "<!-- /numbers -->"


def is_plain(row: dict) -> bool:
    """Whether the row was measured with plain scales."""
    return "swizzled" not in row["variant"] and "quads" not in row["variant"]


def as_read_on_a_gpu(rows: list[dict]) -> list[dict]:
    """Drops the row with plain scales of an op that was also timed with swizzled scales or quads, which are what GPUs read."""
    known = {(row["op"], row["variant"]) for row in rows}
    return [
        row for row in rows if all((row["op"], f"{row['variant']} {layout}") not in known for layout in ("swizzled", "quads"))
    ]


def ops_table(report: dict) -> str:
    rows = []
    for row in report["rows"]:
        if not is_plain(row) or "f32" in row["variant"]:
            continue
        peer = f"{row['times_torchao']:.0f}x faster" if "times_torchao" in row else ""
        shape = " x ".join(map(str, row["shape"])) + (f", {row['num_groups']} groups" if row["num_groups"] else "")
        rows.append(
            [
                f"`{row['op']}` {row['variant']}",
                shape,
                f"{row['seconds']['median'] * 1e3:.1f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['of_copy']:.0%}",
                peer,
            ]
        )
    copy = f"{about(report)}: a copy of 1 GiB moves {report['copy']['gb_per_s']:.1f} GB/s. {median_of(report)}"
    return table_of(copy, ["op", "shape", "ms", "GB/s", "of a copy", "against torchao"], rows, words=2)


# Ops on so little data that their rates cannot be compared with that of a copy of 1 GiB.
SMALL = ("route", "swizzle_scale", "copy")
WITHOUT_GROUPS = ("swiglu", "swiglu_backward")


def widths_table(report: dict) -> str:
    """The table of ops on tokens: percent of a copy's bandwidth, with a column for each width."""
    rows = [row for row in report["rows"] if len(row["shape"]) == 2 and row["shape"][0] == 131072 and row["op"] not in SMALL]
    widths = list(dict.fromkeys(row["shape"][1] for row in rows))
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(f"`{row['op']}` {row['variant']}", []).append(f"{100 * row['of_copy']:.1f}")
    return table_of(
        f"{about(report)}. {median_of(report)}",
        ["percent of a copy, 131072 rows", *map(str, widths)],
        [[name, *cells] for name, cells in found.items()],
    )


def weights_table(report: dict) -> str:
    """The table of ops on weights: percent of a copy's bandwidth. Rows that compare FLOOR and RCEIL are left out."""
    rows = [row for row in report["rows"] if len(row["shape"]) == 3 and not row["variant"].endswith(("floor", "rceil"))]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(f"`{row['op']}` {row['variant']}", []).append(f"{100 * row['of_copy']:.1f}")
    return table_of(
        "The same run.",
        ["percent of a copy", *(" x ".join(map(str, shape)) for shape in shapes)],
        [[name, *cells] for name, cells in found.items()],
    )


def scales_table(report: dict) -> str:
    """The table of swizzle_scale beside a copy of the same bytes."""
    times = {
        (row["op"], row["variant"]): row["seconds"]["median"] for row in report["rows"] if row["op"] in ("swizzle_scale", "copy")
    }
    rows = []
    for (op, variant), seconds in times.items():
        if op == "swizzle_scale":
            copy = times["copy", variant]
            rows.append([variant, f"{seconds * 1e6:.1f}", f"{copy * 1e6:.1f}", f"{seconds / copy:.2f}x"])
    return table_of("The same run.", ["`swizzle_scale`", "us", "a copy, us", "time"], rows)


def groups_table(report: dict) -> str:
    """The table of ops with many groups: percent of a copy's bandwidth, and how much slower they are than with few."""
    with_few = json.loads((RESULTS / GPU / "ops.json").read_text())["rows"]
    few = {(row["op"], row["variant"], *row["shape"]): row["of_copy"] for row in with_few}
    rows = as_read_on_a_gpu([row for row in report["rows"] if row["op"] not in (*SMALL, *WITHOUT_GROUPS)])
    widths = list(dict.fromkeys(row["shape"][1] for row in rows))
    found: dict[str, list[str]] = {}
    for row in rows:
        slower = few[(row["op"], row["variant"], *row["shape"])] / row["of_copy"]
        found.setdefault(f"`{row['op']}` {row['variant']}", []).extend(
            [f"{100 * row['of_copy']:.1f}", f"{100 * slower - 100:+.1f} %"]
        )
    head = [cell for width in widths for cell in (str(width), f"slower than {with_few[0]['num_groups']} groups")]
    return table_of(
        f"{about(report)}. {median_of(report)}",
        [f"percent of a copy, {rows[0]['shape'][0]} rows, {rows[0]['num_groups']} groups", *head],
        [[name, *cells] for name, cells in found.items()],
    )


def grouped_mm_table(report: dict) -> str:
    rows = []
    for row in report["rows"]:
        *sizes, groups = row["shape"]
        name = row["name"] if " " in row["name"] else f"`{row['name']}`"
        ms = [f"{row[part]['median'] * 1e3:.1f}" for part in ("forward_seconds", "backward_seconds", "seconds")]
        rows.append([name, f"{' x '.join(map(str, sizes))}, {groups} {row['groups']}", *ms, f"{row['times_bf16']:.2f}x"])
    return table_of(
        f"{about(report)}, oneDNN up to {report['machine']['onednn_max_isa']}. {median_of(report)}",
        ["", "M x N x K, groups", "forward ms", "backward ms", "both ms", "of bf16"],
        rows,
        words=2,
    )


def by_shape(rows: list[dict]) -> dict[tuple[int, ...], dict[str, dict]]:
    """Rows as shape -> name -> row. Of several rows of one name (bf16 is measured in two ways) only the fastest."""
    found: dict[tuple[int, ...], dict[str, dict]] = {}
    for row in rows:
        lines = found.setdefault(tuple(row["shape"]), {})
        known = lines.get(row["name"])
        if known is None or row["seconds"]["median"] < known["seconds"]["median"]:
            lines[row["name"]] = row
    return found


def shape_text(shape: tuple[int, ...]) -> str:
    return f"{' x '.join(map(str, shape[:-1]))}, {shape[-1]} group{'s' * (shape[-1] != 1)}"


BF16, OURS = "torch bf16", "mxfp8_rceil_128"


def headline_table(report: dict) -> str:
    """The table of forward and backward: Moxie's speed-up over bf16 for each shape."""
    rows = []
    for shape, lines in by_shape(report["rows"]).items():
        ours, cached = lines[OURS], lines[f"{OURS}, w quantized before"]
        milliseconds = [f"{lines[name]['seconds']['median'] * 1e3:.2f}" for name in (BF16, OURS)]
        times = [1 / ours["times_bf16"], 1 / ours["sustained_times_bf16"], 1 / cached["times_bf16"]]
        rows.append([shape_text(shape), *milliseconds, *(f"{value:.2f}x" for value in times)])
    return table_of(
        f"{about(report)}. {median_of(report)}",
        ["M x N x K", "bf16, ms", f"`{OURS}`, ms", "times as fast", "sustained", "weights quantized before"],
        rows,
    )


def headline(report: dict) -> str:
    times = [
        1 / rows[OURS][name] for rows in by_shape(report["rows"]).values() for name in ("times_bf16", "sustained_times_bf16")
    ]
    return (
        "**Fast on Hopper:** forward and backward over ragged groups, all quantization included, are "
        f"{min(times):.2f} to {max(times):.2f} times as fast as torch's bf16 on an "
        f"{report['machine']['name'].split()[-1]} ([more](docs/PERFORMANCE.md))."
    )


def quoted(name: str) -> str:
    """Formats the name of a line, such as "mxfp8_rceil_128, w quantized before": the recipe as code, the rest as text."""
    recipe, *more = name.split(", ", 1)
    return ", ".join([f"`{recipe}`", *more])


def recipes_table(report: dict) -> str:
    shapes = by_shape(report["rows"])
    recipes = [name for name in next(iter(shapes.values())) if name != BF16]
    rows = [
        [shape_text(shape), *(f"{1 / lines[name]['times_bf16']:.2f}x" for name in recipes)] for shape, lines in shapes.items()
    ]
    return table_of(f"{about(report)}. {median_of(report)}", ["times as fast as bf16", *map(quoted, recipes)], rows)


def products_table(report: dict) -> str:
    """The table of --passes: TFLOPS of each GEMM, and its share of the dense FP8 GEMM's in the same run."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for row in report["passes"]:
        if row["flops"]:
            of_dense = f"; {row['sustained_of_dense']:.3f}" if row["name"] else ""
            shapes.setdefault(tuple(row["shape"]), []).append(f"{row['burst']:.0f}; {row['sustained']:.0f}{of_dense}")
    return table_of(
        f"{about(report)}. {median_of(report)}",
        ["burst; sustained; of dense sustained", "forward", "dgrad", "wgrad, bf16 dw", "dense 8192^3"],
        [[shape_text(shape), *cells] for shape, cells in shapes.items()],
    )


def sqnr_table(report: dict) -> str:
    *sizes, groups = report["shape"]
    kept = [f"x kept, {rows} rows in {count} groups" for rows, count in report["memory"]]
    rows = [
        [
            f"`{row['recipe']}`",
            *(f"{row[name]:.1f}" for name in ("y", "dx", "dw")),
            *(f"{share:.2f}" for share in row["kept_of_bf16"]),
        ]
        for row in report["rows"]
    ]
    return table_of(
        f"M x N x K = {' x '.join(map(str, sizes))}, {groups} ragged groups, {report['machine']['name']}, {source(report)}",
        ["recipe", "y, dB", "dx, dB", "dw, dB", *kept],
        rows,
    )


def convergence_table(report: dict) -> str:
    lines = [
        f"{report['machine']['name']}, {report['date'][:10]}, {source(report)}",
        "",
        "| recipe | kept | held-out loss | bf16's | bigram entropy | difference | 95 % interval "
        "| `--require 1 --require-learned` |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in report["rows"]:
        lines.append(
            f"| `{row['recipe']}` | `{row.get('kept', 'h')}` | "
            f"{row['eval_loss']:.4f} | {row['base_eval_loss']:.4f} | {row['bigram_entropy']:.4f} | "
            f"{row['difference_percent']:+.2f} % | {row['interval_percent'][0]:+.2f} % to {row['interval_percent'][1]:+.2f} % | "
            f"{'passes' if row['passes'] else 'fails'} |"
        )
    return "\n".join(lines)


def curves_table(report: dict) -> str:
    steps = report["curves"][0]["steps"]
    lines = [
        f"{report['machine']['name']}, {report['date'][:10]}, {source(report)}",
        "",
        f"| held-out loss, mean of 3 seeds, after | {' | '.join(f'{step} steps' for step in steps)} |",
        "|---|" + "--:|" * len(steps),
    ]
    for row in report["curves"]:
        for device, name in (("cpu", "a CPU"), ("cuda", "the GPU")):
            lines.append(f"| `{row['recipe']}` on {name} | {' | '.join(f'{loss:.3f}' for loss in row[device])} |")
    deviation = [max(row["seed_deviation"][i] for row in report["curves"]) for i in range(len(steps))]
    lines.append(f"| standard deviation between seeds | {' | '.join(f'{value:.3f}' for value in deviation)} |")
    return "\n".join(lines)


# (page, name in the marker there, file of results, function that formats them)
TABLES = [
    ("docs/PERFORMANCE.md", "cpu", f"{CPU}/ops.json", ops_table),
    ("docs/PERFORMANCE.md", "grouped_mm", f"{CPU}/grouped_mm.json", grouped_mm_table),
    ("README.md", "headline", f"{GPU}/grouped_mm.json", headline),
    ("README.md", "layer_headline", f"{GPU}/moe.json", moe_tables.headline),
    ("README.md", "grouped_mm_gpu", f"{GPU}/grouped_mm.json", headline_table),
    ("docs/PERFORMANCE.md", "grouped_mm_recipes", f"{GPU}/grouped_mm_recipes.json", recipes_table),
    ("docs/kernels/grouped_gemm.md", "products", f"{GPU}/grouped_mm.json", products_table),
    ("docs/kernels/measured.md", "products_w2", f"{GPU}/grouped_mm_w2.json", products_table),
    ("docs/kernels/measured.md", "steps_w2", f"{GPU}/grouped_mm_w2.json", headline_table),
    ("docs/kernels/measured.md", "grid", f"{GPU}/grouped_mm_grid.json", recipes_table),
    ("docs/kernels/measured.md", "widths", f"{GPU}/ops.json", widths_table),
    ("docs/kernels/measured.md", "weights", f"{GPU}/ops.json", weights_table),
    ("docs/kernels/measured.md", "scales", f"{GPU}/ops.json", scales_table),
    ("docs/kernels/measured.md", "groups", f"{GPU}/ops_groups.json", groups_table),
    ("docs/COMPARE.md", "convergence", "amd-epyc-2-threads/convergence.json", convergence_table),
    ("docs/COMPARE.md", "curves", f"{GPU}/convergence.json", curves_table),
    ("docs/MOE.md", "layer", f"{GPU}/moe.json", moe_tables.layer_table),
    ("docs/MOE.md", "layer_memory", f"{GPU}/moe.json", moe_tables.memory_table),
    ("docs/MOE.md", "growth_tokens", f"{GPU}/moe_tokens.json", moe_tables.growth_table),
    ("docs/MOE.md", "growth_tokens_dsv3", f"{GPU}/moe_tokens_dsv3.json", moe_tables.growth_table),
    ("docs/MOE.md", "growth_experts", f"{GPU}/moe_experts.json", moe_tables.growth_table),
    ("docs/MOE.md", "router", f"{GPU}/router.json", moe_tables.router_table),
    ("docs/HUGGING_FACE.md", "hf", f"{GPU}/hf.json", hf_tables.speed_table),
    ("docs/MOE.md", "layer_sqnr", "amd-epyc-2-threads/layer_sqnr.json", moe_tables.layer_sqnr_table),
    ("docs/RECIPES.md", "sqnr", "amd-epyc-2-threads/sqnr.json", sqnr_table),
    ("docs/EXPERT_PARALLEL.md", "symmetric", f"{GPU}/engines.json", engines_tables.one_process_table),
    ("docs/EXPERT_PARALLEL.md", "c10d", f"{GPU}/engines.json", engines_tables.c10d_table),
    *(("docs/COST_MODEL.md", name, EXCHANGE, table) for name, table in exchange_tables.TABLES.items()),
]


def with_table(text: str, name: str, table: str) -> str:
    begin = f"<!-- numbers:{name}, written by bench/publish.py -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{END}{rest.split(END, 1)[1]}"


def pages() -> dict[pathlib.Path, str]:
    """The text of every page, with tables made of the current results."""
    texts = {}
    for page, name, results, table in TABLES:
        path = ROOT / page
        report = RESULTS / results
        content = table(json.loads(report.read_text())) if report.exists() else "Not measured yet."
        texts[path] = with_table(texts.get(path) or path.read_text(), name, content)
    return texts


def on_tokens(report: dict, shape: list[int]) -> list[dict]:
    """Rows of this shape."""
    return [row for row in report["rows"] if row["shape"] == shape and row["op"] not in SMALL]


def draw(report: dict, rows: list[dict], where: str, name: str) -> None:
    """Draws a bar of GB/s for each row (all of one shape), and a line at the copy's GB/s."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{row['op']}  {row['variant']}" for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.3))
    bars = axes.barh(names, [row["gb_per_s"] for row in rows], color="#3b6ea8", height=0.65)
    axes.bar_label(
        bars,
        [f"{row['gb_per_s']:.{1 if row['gb_per_s'] < 1000 else 0}f}" for row in rows],
        padding=4,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )
    axes.axvline(report["copy"]["gb_per_s"], color="#444444", linestyle="--", linewidth=1, zorder=0)
    axes.text(report["copy"]["gb_per_s"], -0.9, " a copy", color="#444444", fontsize=9, va="center")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, each tensor counted once")
    axes.set_title(
        f"{' x '.join(map(str, rows[0]['shape']))} in {rows[0]['num_groups']} ragged groups, {where}",
        fontsize=11,
        loc="left",
        pad=16,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / name, dpi=110)


def draw_grouped(report: dict, name: str) -> None:
    """Draws the speed-up over bf16, and each GEMM's share of the dense GEMM's TFLOPS."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2))
    shapes = by_shape(report["rows"])
    labels = [f"M {m}\n{n} x {k}\n{groups} groups" for m, n, k, groups in shapes]
    times = {
        "burst": [1 / rows[OURS]["times_bf16"] for rows in shapes.values()],
        "sustained": [1 / rows[OURS]["sustained_times_bf16"] for rows in shapes.values()],
        "burst, weights quantized before": [1 / rows[f"{OURS}, w quantized before"]["times_bf16"] for rows in shapes.values()],
    }
    products = {part: [row for row in report["passes"] if row["pass"] == part] for part in ("forward", "dgrad", "wgrad")}
    rates = {part: [row["sustained"] for row in rows] for part, rows in products.items()}
    dense = [row["sustained"] for row in report["passes"] if row["flops"] and not row["name"]]
    for axes, bars, form in ((left, times, "{:.2f}"), (right, rates, "{:.0f}")):
        for i, (label, values) in enumerate(bars.items()):
            at = [place + (i - 1) * 0.27 for place in range(len(shapes))]
            drawn = axes.bar(at, values, width=0.25, label=label, color=("#3b6ea8", "#7fb07f", "#d9a441")[i])
            axes.bar_label(drawn, [form.format(value) for value in values], fontsize=7, padding=-11, color="white")
        axes.set_xticks(range(len(shapes)), labels, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    left.axhline(1, color="#444444", linestyle="--", linewidth=1)
    left.text(len(shapes) - 0.45, 1.0, " bf16", fontsize=8, va="center")
    left.set_ylabel("times as fast as torch bf16")
    left.set_title(f"{OURS}: forward and backward, with all quantization", fontsize=10, loc="left")
    for place, rate in enumerate(dense):
        right.plot(
            [place - 0.42, place + 0.42],
            [rate, rate],
            color="#444444",
            linewidth=1.2,
            label=None if place else "dense fp8 8192^3, torch",
        )
    right.set_ylabel("TFLOPS, sustained")
    right.set_title("the products alone, ragged groups", fontsize=10, loc="left")
    for axes in (left, right):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False)
    figure.suptitle(about(report), fontsize=9, x=0.99, ha="right")
    figure.tight_layout()
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
    import grouped_plots  # --check needs no matplotlib

    of_cpu, of_gpu = (json.loads((RESULTS / folder / "ops.json").read_text()) for folder in (CPU, GPU))
    plain = [row for row in on_tokens(of_cpu, of_cpu["rows"][0]["shape"]) if is_plain(row)]
    draw(of_cpu, plain, f"{of_cpu['machine']['threads']} CPU threads", "ops-cpu.png")
    draw(of_gpu, as_read_on_a_gpu(on_tokens(of_gpu, [131072, 7168])), of_gpu["machine"]["name"], "ops-h200.png")
    draw_grouped(json.loads((RESULTS / GPU / "grouped_mm.json").read_text()), "grouped-h200.png")
    grid = json.loads((RESULTS / GPU / "grouped_mm_grid.json").read_text())
    grouped_plots.draw(grid, PICTURES / "grid-h200.png", "cuda", BF16, about(grid))
    exchange_tables.draw(json.loads((RESULTS / EXCHANGE).read_text()), PICTURES / exchange_tables.PICTURE)
    layer = RESULTS / GPU / "moe.json"
    if layer.exists():
        moe_tables.draw(json.loads(layer.read_text()), PICTURES / moe_tables.PICTURE)
    grown = [json.loads((RESULTS / GPU / f"moe_{what}.json").read_text()) for what in ("tokens", "tokens_dsv3", "experts")]
    moe_tables.draw_growth(grown, PICTURES / moe_tables.GROWTH_PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
