"""Plots of bench/grouped_mm.py: speed-up over bf16 against M, and the roofline of the GEMMs of --passes."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written together, of a copy of 1 GiB (256 MiB on a CPU)."""
    import torch

    import harness  # must come before torch, but is imported here, because plots of existing results need neither

    a = torch.randn((1 << 28 if device == "cuda" else 1 << 26), device=device)
    b = torch.empty_like(a)
    seconds = sorted(harness.seconds_of(lambda: b.copy_(a), device) for _ in range(5))
    return 2.0 * a.numel() * a.element_size() / seconds[2]


MARKERS = "osD^vP*X"  # one per number of groups


def draw_speed_up(axes, rows: list[dict], size: tuple[int, int], keys: tuple[list[str], list[int]]) -> None:
    """Plots speed-up against M for rows of one N x K: a colour per recipe, a marker per number of groups.

    Sustained times have hollow markers and dashed lines.
    """
    names, groups_of = keys
    lines: dict[tuple[str, int, str], list[tuple[int, float]]] = {}
    for row in rows:
        m, n, k, groups = row["shape"]
        if (n, k) != size:
            continue
        for field, style in (("times_bf16", "-"), ("sustained_times_bf16", "--")):
            if field in row:
                lines.setdefault((row["name"], groups, style), []).append((m, 1 / row[field]))
    for (name, groups, style), points in lines.items():
        m, speed_up = zip(*sorted(points))
        axes.plot(
            m,
            speed_up,
            style,
            color=f"C{names.index(name) % 10}",
            linewidth=1,
            markersize=5,
            marker=MARKERS[groups_of.index(groups) % len(MARKERS)],
            fillstyle="full" if style == "-" else "none",
        )
    ticks = sorted({row["shape"][0] for row in rows})
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.minorticks_off()
    axes.set(xlabel="M", title=f"N x K = {size[0]} x {size[1]}")


def legend_of(figure, keys: tuple[list[str], list[int]], sustained: bool) -> None:
    """Draws the legend below the panels."""
    names, groups_of = keys
    line = lambda label, **how: matplotlib.lines.Line2D([], [], label=label, **how)
    handles = [line(name, color=f"C{i % 10}") for i, name in enumerate(names)]
    handles += [
        line(f"{groups} groups" if groups > 1 else "1 group", color="gray", linestyle="none", marker=MARKERS[i % len(MARKERS)])
        for i, groups in enumerate(groups_of)
    ]
    if sustained:
        handles.append(line("sustained", color="gray", linestyle="--", marker="o", fillstyle="none"))
    figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), 5), fontsize="small", frameon=False)


def draw_roofline(axes, passes: list[dict], device: str) -> None:
    products = [row for row in passes if row["flops"]]
    bandwidth, top = copy_bandwidth(device), max(row["burst"] for row in products)
    first, last = (pick(row["flops"] / row["bytes"] for row in products) for pick in (min, max))
    intensity = [first / 8, top * 1e12 / bandwidth, max(last * 2, top * 2e12 / bandwidth)]
    axes.plot(
        intensity,
        [min(x * bandwidth / 1e12, top) for x in intensity],
        color="gray",
        label=f"copy, {bandwidth / 1e9:.0f} GB/s; the fastest product here, {top:.4g} TFLOPS",
    )
    for name, marker in (("forward", "o"), ("dgrad", "s"), ("wgrad", "^")):
        points = [row for row in products if row["pass"] == name]
        axes.plot(
            [row["flops"] / row["bytes"] for row in points],
            [row["burst"] for row in points],
            marker,
            linestyle="none",
            label=name,
        )
    dense = [row for row in products if row["pass"] not in ("forward", "dgrad", "wgrad")]
    for row in dense[:1]:
        axes.plot([row["flops"] / row["bytes"]], [row["burst"]], "*", markersize=10, label=row["pass"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="FLOP per byte", ylabel="TFLOPS", title="products alone, burst")
    axes.legend(fontsize="x-small")  # where there is room


def draw(report: dict, path: pathlib.Path, device: str, baseline: str, title: str) -> None:
    rows = [row for row in report["rows"] if row["name"] != baseline]
    sizes = list(dict.fromkeys((row["shape"][1], row["shape"][2]) for row in rows))
    keys = (list(dict.fromkeys(row["name"] for row in rows)), sorted({row["shape"][3] for row in rows}))
    count = len(sizes) + bool(report["passes"])
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 5.2), squeeze=False)
    speed_ups = axes[0][: len(sizes)]
    for of_size, size in zip(speed_ups, sizes):
        draw_speed_up(of_size, rows, size, keys)
    lowest, highest = zip(*(of_size.get_ylim() for of_size in speed_ups))
    for of_size in speed_ups:
        of_size.set_ylim(min(lowest), max(highest))
    axes[0][0].set_ylabel(f"forward and backward, times {baseline}")
    if report["passes"]:
        draw_roofline(axes[0][-1], report["passes"], device)
    legend_of(figure, keys, any("sustained_times_bf16" in row for row in rows))
    figure.suptitle(title, fontsize="small")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")  # tight: the legend can be wider than the panels
