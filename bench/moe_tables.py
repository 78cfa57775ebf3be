"""Formats the tables and draws the plot of the MoE layer; bench/publish.py puts them into docs/MOE.md."""

import pathlib
import re

from doc_tables import about, median_of, source, table_of

OURS = "Moxie mxfp8_rceil_128"
CACHED = f"{OURS}, weight cache"
LEAN = f"{OURS}, h in FP8"
BF16, COMPILED, SONIC = "Moxie bf16", "stock compiled", "SonicMoE"
PICTURE = "layer-h200.png"
GROWTH_PICTURE = "layer-growth-h200.png"
RESULTS = ("y", "dx", "dw13", "dw2", "dweights")  # columns of the SQNR table: results of the layer without its router
SHAPE = "tokens x dim x hidden x experts x top-k"


def by_shape(report: dict) -> dict[tuple[int, ...], dict[str, dict]]:
    """Rows of the report as shape -> name of the line -> row."""
    found: dict[tuple[int, ...], dict[str, dict]] = {}
    for row in report["rows"]:
        found.setdefault(tuple(row["shape"]), {})[row["name"]] = row
    return found


def names_of(report: dict) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in report["rows"]))


def shape_text(lines: dict[str, dict]) -> str:
    """The sizes of the shape, with its name in brackets if it has one."""
    row = next(iter(lines.values()))
    sizes = " x ".join(map(str, row["shape"]))
    return sizes if row["shape_name"] == "x".join(map(str, row["shape"])) else f"{sizes} ({row['shape_name']})"


def milliseconds(row: dict | None) -> str:
    return f"{row['seconds']['median'] * 1e3:.2f}" if row else ""


def layer_sqnr_table(report: dict) -> str:
    sizes = " x ".join(map(str, report["shape"]))
    rows = [[f"`{row['recipe']}`", f"`{row['kept']}`", *(f"{row[name]:.2f}" for name in RESULTS)] for row in report["rows"]]
    return table_of(
        f"{SHAPE}: {sizes}; mean of {report['seeds']} seeds, {report['machine']['name']}, {source(report)}",
        ["recipe", "kept", *(f"{name}, dB" for name in RESULTS)],
        rows,
        words=2,
    )


def layer_table(report: dict) -> str:
    """The table of all lines' milliseconds per step, and of Moxie's speed-up over the best rival."""
    names = names_of(report)
    rows, rivals = [], {}
    for lines in by_shape(report).values():
        ours = [lines[name] for name in (OURS, CACHED)]
        rivals |= {lines[OURS]["shape_name"]: lines[OURS]["best_rival"]}
        times = [f"{row['times_as_fast']:.2f}x; {row['sustained_times_as_fast']:.2f}x" for row in ours]
        rows.append([shape_text(lines), *(milliseconds(lines.get(name)) for name in names), *times])
    head = [
        SHAPE,
        *(f"{name}, ms" for name in names),
        "times as fast as the best rival; sustained",
        "with a weight cache; sustained",
    ]
    ways = {row["shape_name"]: row["way"] for row in report["rows"] if "way" in row}
    best = ", ".join(f"{shape}: {name}" for shape, name in rivals.items())
    if ways:
        best += ". Ways of compiled stock torch: " + ", ".join(f"{shape}: `{way}`" for shape, way in ways.items())
    return (
        table_of(f"{about(report)}. {median_of(report)} Best rivals: {best}.", head, rows)
        + f"\n\n![the layer beside its rivals: time and memory](pictures/{PICTURE})"
    )


def headline(report: dict) -> str:
    """The layer against the best layer in bf16: a rival, or Moxie's own."""
    burst, sustained = (lambda row: row["seconds"]["median"]), (lambda row: row["sustained_seconds"])
    times, kept, cached, is_estimated = [], [], [], False
    for lines in by_shape(report).values():
        ours, own_bf16 = lines[OURS], lines[BF16]
        times.append(min(ours["times_as_fast"], burst(own_bf16) / burst(ours)))
        times.append(min(ours["sustained_times_as_fast"], sustained(own_bf16) / sustained(ours)))
        compiled = lines[COMPILED]["saved_mib"]
        kept.append(ours["saved_mib"] / compiled)
        cached.append(lines[CACHED]["saved_mib"] / compiled)
        is_estimated |= SONIC not in lines
    estimated = " (SonicMoE's time is an estimate)" if is_estimated else ""
    return (
        "**The whole layer:** router, permutation, experts and weighted sum, forward and backward, are "
        f"{min(times):.2f} to {max(times):.2f} times as fast as the best layer in bf16, Moxie's own among them{estimated}. It "
        f"keeps {min(kept):.2f} to {max(kept):.2f} of what compiled torch keeps for backward; a weight cache, two bytes per "
        f"weight that are always held, lowers that to {min(cached):.2f} to {max(cached):.2f} "
        "([more](docs/MOE.md#speed-and-memory))."
    )


def memory_table(report: dict) -> str:
    names = names_of(report)
    rows = []
    for lines in by_shape(report).values():
        cells = [f"{lines[name]['saved_mib']:.0f}; {lines[name]['peak_mib']:.0f}" if name in lines else "" for name in names]
        rows.append([shape_text(lines), *cells])
    return table_of("The same run.", ["MiB: saved; peak", *names], rows)


def per_row(row: dict) -> str:
    """Nanoseconds of a step per row: a token is as many rows as it has experts."""
    tokens, *_, top_k = row["shape"]
    return f"{row['seconds']['median'] * 1e9 / (tokens * top_k):.1f}"


def growth_table(report: dict) -> str:
    """The table of --growth: milliseconds of each line, what a row takes, and MiB that Moxie keeps for backward."""
    names = names_of(report)
    rows = []
    for lines in by_shape(report).values():
        times = [milliseconds(lines.get(name)) for name in names]
        rows.append([shape_text(lines), *times, per_row(lines[CACHED]), f"{lines[OURS]['saved_mib']:.0f}"])
    head = [SHAPE, *(f"{name}, ms" for name in names), "with a weight cache, ns per row", f"{OURS}, saved MiB"]
    return table_of(f"{about(report)}. {median_of(report)}", head, rows)


def draw_growth(reports: list[dict], path: pathlib.Path) -> None:
    """Draws the time of a row against the number of tokens and the number of experts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(reports), figsize=(13, 3.8))
    for axes, report in zip(panels, reports):
        shapes = list(by_shape(report).values())
        sizes = [lines[OURS]["shape"] for lines in shapes]
        at = 0 if sizes[0][0] < sizes[-1][0] else 3  # tokens, or experts
        for name in names_of(report):
            axes.plot([size[at] for size in sizes], [float(per_row(lines[name])) for lines in shapes], marker="o", label=name)
        fixed = " x ".join(str(size) for i, size in enumerate(sizes[-1]) if i != at)
        axes.set_title(f"ns per row, by number of {('tokens', '', '', 'experts')[at]}; {fixed}", fontsize=9, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="lower center", ncols=len(texts), fontsize=8, frameon=False)
    figure.suptitle(about(reports[0]), fontsize=9, x=0.99, ha="right")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def router_table(report: dict) -> str:
    lines: dict[str, dict[str, dict]] = {}
    for row in report["rows"]:
        lines.setdefault(row["shape_name"], {})[row["name"]] = row
    rows = []
    for shape, found in lines.items():
        logits = found["logits"]
        sizes = " x ".join(map(str, logits["shape"]))
        microseconds = [1e6 * seconds for seconds in (logits["seconds"]["median"], logits["bound_seconds"])]
        times = [*(f"{value:.0f}" for value in microseconds), f"{logits['of_bound']:.2f}x"]
        rows.append([f"{sizes} ({shape})", *times, f"{1e6 * found['choice']['seconds']['median']:.0f}"])
    head = [SHAPE, "logits, us", "bound, us", "time of bound", "choice, us"]
    return table_of(f"{about(report)}. {median_of(report)}", head, rows)


def draw(report: dict, path: pathlib.Path) -> None:
    """Draws bars of milliseconds per step and of MiB saved for backward, grouped by shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes, names = by_shape(report), names_of(report)
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.4))
    # Two lines of sizes, because the whole text is wider than the bars of a shape.
    labels = [re.sub(r"^(\S+ x \S+) x (.*) \((.*)\)$", r"\3\n\1\nx \2", shape_text(lines)) for lines in shapes.values()]
    values = (
        ("ms of a step, burst", lambda row: row["seconds"]["median"] * 1e3),
        ("MiB saved for backward", lambda row: row["saved_mib"]),
    )
    width = 0.85 / len(names)
    for axes, (title, value) in zip(panels, values):
        for i, name in enumerate(names):
            at = [place + (i - (len(names) - 1) / 2) * width for place in range(len(shapes))]
            heights = [value(lines[name]) if name in lines else 0.0 for lines in shapes.values()]
            bars = axes.bar(at, heights, width=0.95 * width, label=name, color=f"C{i % 10}")
            axes.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=6, padding=1)
        axes.set_xticks(range(len(shapes)), labels, fontsize=7)
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="lower center", ncols=len(names), fontsize=8, frameon=False)
    figure.suptitle(about(report), fontsize=9, x=0.99, ha="right")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
