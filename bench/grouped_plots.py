"""The pictures of bench/grouped_mm.py: speed-up over bf16 against M, and the roofline of the products of --passes."""

import pathlib

import harness  # before torch
import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy of 1 GiB (256 MiB on a CPU)."""
    a = torch.randn((1 << 28 if device == "cuda" else 1 << 26), device=device)
    b = torch.empty_like(a)
    seconds = sorted(harness.seconds_of(lambda: b.copy_(a), device) for _ in range(5))
    return 2.0 * a.numel() * a.element_size() / seconds[2]


def draw_speed_up(axes, rows: list[dict], baseline: str) -> None:
    """A colour per recipe and N x K, G; sustained dashed, the baseline left out."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        m, n, k, groups = row["shape"]
        if row["name"] == baseline:
            continue
        line = lines.setdefault(f"{row['name']}, {n} x {k}, {groups} groups", {"burst": [], "sustained": []})
        line["burst"].append((m, 1 / row["times_bf16"]))
        if "sustained_times_bf16" in row:
            line["sustained"].append((m, 1 / row["sustained_times_bf16"]))
    for number, (label, line) in enumerate(lines.items()):
        for protocol, style in (("burst", "o-"), ("sustained", "o--")):
            if line[protocol]:
                m, speed_up = zip(*sorted(line[protocol]))
                axes.plot(m, speed_up, style, color=f"C{number % 10}", fillstyle="full" if protocol == "burst" else "none",
                          label=label if protocol == "burst" else None)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="M", ylabel=f"times {baseline}", title="forward and backward (hollow, dashed: sustained)")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14))


def draw_roofline(axes, passes: list[dict], device: str) -> None:
    products = [row for row in passes if row["flops"]]
    bandwidth, top = copy_bandwidth(device), max(row["burst"] for row in products)
    first, last = (pick(row["flops"] / row["bytes"] for row in products) for pick in (min, max))
    intensity = [first / 8, top * 1e12 / bandwidth, max(last * 2, top * 2e12 / bandwidth)]
    axes.plot(intensity, [min(x * bandwidth / 1e12, top) for x in intensity], color="gray",
              label=f"copy, {bandwidth / 1e9:.0f} GB/s; the fastest product here, {top:.4g} TFLOPS")
    for name, marker in (("forward", "o"), ("dgrad", "s"), ("wgrad", "^")):
        points = [row for row in products if row["pass"] == name]
        axes.plot([row["flops"] / row["bytes"] for row in points], [row["burst"] for row in points], marker,
                  linestyle="none", label=name)
    dense = [row for row in products if row["pass"] not in ("forward", "dgrad", "wgrad")]
    for row in dense[:1]:
        axes.plot([row["flops"] / row["bytes"]], [row["burst"]], "*", markersize=10, label=row["pass"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="FLOP per byte", ylabel="TFLOPS", title="products alone, burst")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14))


def draw(report: dict, path: pathlib.Path, device: str, baseline: str) -> None:
    count = 1 + bool(report["passes"])
    figure, axes = plt.subplots(1, count, figsize=(7 * count, 6.5), squeeze=False)
    draw_speed_up(axes[0][0], report["rows"], baseline)
    if report["passes"]:
        draw_roofline(axes[0][1], report["passes"], device)
    figure.suptitle(harness.about(report), fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
