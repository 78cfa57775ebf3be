"""Formats the tables and draws the picture of docs/COST_MODEL.md, the cost model of expert parallelism."""

import pathlib

from doc_tables import table_of

PICTURE = "exchange-cost.png"
WIRES = {"bf16": "bf16", "bf16_once": "bf16 once", "fp8": "FP8", "fp8_once": "FP8 once"}
LEGS = {"dispatch_x": "x", "combine_y": "y", "dispatch_dy": "dy", "combine_dx": "dx"}


def about(model: dict) -> str:
    return (
        f"{model['tokens']} tokens per rank, dim {model['dim']}, hidden {model['hidden']}, top {model['top_k']} of "
        f"{model['experts']} experts; NVLink {model['nvlink_gb_per_s']:.0f} GB/s among {model['domain']} ranks, NIC "
        f"{model['nic_gb_per_s']:.0f} GB/s; the products at {model['tflops']:.0f} TFLOPS, measured on an H200"
    )


def label(size: dict) -> str:
    return f"{size['ep']}{' (extrapolated)' if size['extrapolated'] else ''}"


def bytes_table(report: dict) -> str:
    """The bytes of each leg in MB: of x and dy for each wire; of y and dx once, because they do not depend on the wire."""
    model = report["direct"]
    rows = []
    for size, limited in zip(model["sizes"], report["limited"]["sizes"], strict=True):
        megabytes = {
            (name, leg["leg"]): f"{leg['bytes'] / 1e6:.1f}" for name, wire in size["wires"].items() for leg in wire["legs"]
        }
        dispatch = [f"{megabytes[name, 'dispatch_x']}; {megabytes[name, 'dispatch_dy']}" for name in WIRES]
        combine = f"{megabytes['fp8_once', 'combine_y']}; {megabytes['fp8_once', 'combine_dx']}"
        ranks = [f"{one['ranks_per_token']:.2f}" for one in (size, limited)]
        rows.append([label(size), *ranks, *dispatch, combine])
    groups = f"with {report['limited']['kept_groups']} of {report['limited']['groups']} groups"
    head = ["EP", "ranks per token", groups, *(f"x; dy, {title}, MB" for title in WIRES.values()), "y; dx, MB"]
    return table_of(f"{about(model)}.", head, rows, words=0)


def times_table(report: dict) -> str:
    model, forwarded = report["direct"], report["forwarded"]
    rows = []
    for size, other in zip(model["sizes"], forwarded["sizes"], strict=True):
        wires = [size["wires"][name] for name in WIRES]
        legs = "; ".join(f"{leg['seconds'] * 1e3:.2f}" for leg in size["wires"]["fp8_once"]["legs"])
        rows.append(
            [
                label(size),
                *(f"{wire['seconds'] * 1e3:.2f}" for wire in wires),
                f"{other['wires']['fp8_once']['seconds'] * 1e3:.2f}",
                legs,
                *(f"{wire['exposed']:.0%}; {wire['exposed_overlapped']:.0%}" for wire in (wires[0], wires[-1])),
            ]
        )
    head = [
        "EP",
        *(f"{title}, ms" for title in WIRES.values()),
        "FP8 once, forwarded, ms",
        f"{'; '.join(LEGS.values())}, FP8 once, ms",
        "exposed; overlapped, bf16",
        "exposed; overlapped, FP8 once",
    ]
    products = model["sizes"][0]["products_seconds"] * 1e3
    return table_of(f"The same layer. The experts' products take {products:.2f} ms.", head, rows, words=0)


def break_even_text(report: dict) -> str:
    found = []
    for name, title in WIRES.items():
        ranks = report["direct"]["break_even"][name]
        found.append(f"{title} {'at no EP of the table' if ranks is None else f'from EP {ranks} on'}")
    return f"Break-even: the four legs take longer than the products, and overlap cannot hide them, with {', '.join(found)}."


def points_table(report: dict) -> str:
    rows = [
        [
            point["series"],
            point["leg"],
            str(point["ep"]),
            f"{point['row_bytes']:.0f}",
            f"{point['published_seconds'] * 1e6:.0f}",
            f"{point['modelled_seconds'] * 1e6:.0f}",
            f"{100 * (point['modelled_seconds'] / point['published_seconds'] - 1):+.1f} %",
            "held back" if point["held_back"] else "fitted",
        ]
        for point in report["published"]["points"]
    ]
    head = ["series", "leg", "EP", "bytes of a row", "published, us", "model, us", "error", ""]
    return table_of("Every second point is held back.", head, rows, words=2)


def sources_list(report: dict) -> str:
    sources = dict.fromkeys((point["series"], point["source"]) for point in report["published"]["points"])
    return "\n".join(f"- {series}: {source}." for series, source in sources)


def errors_text(report: dict) -> str:
    published = report["published"]
    fit, held, fitted, swapped, logged = (published[name] for name in ("fit", "held_back", "fitted", "swapped", "bytes"))
    of_bytes = logged["modelled"] / (sum(logged["logged"]) / len(logged["logged"])) - 1
    return (
        f"The fit: NVLink gives {fit['nvlink_share']:.3f} of its stated speed, a NIC {fit['nic_share']:.3f}; a leg takes "
        f"{fit['seconds'] * 1e6:.1f} us before its first byte, and {fit['seconds_per_peer'] * 1e6:.3f} us for each peer. "
        f"**Held-back times: {held['count']} points, median error {held['median']:.1%}, worst {held['worst']:.1%}** (fitted: "
        f"{fitted['count']}, {fitted['median']:.1%} and {fitted['worst']:.1%}; with the halves exchanged, "
        f"{swapped['median']:.1%} and {swapped['worst']:.1%}). Bytes of the log: {len(logged['logged'])} ranks, "
        f"{of_bytes:+.2%} of their mean, worst rank {logged['errors']['worst']:.2%}."
    )


# name in the marker of docs/COST_MODEL.md -> function that formats the table
TABLES = {
    "exchange_bytes": bytes_table,
    "exchange_times": times_table,
    "exchange_break_even": break_even_text,
    "exchange_errors": errors_text,
    "exchange_points": points_table,
    "exchange_sources": sources_list,
}

COLORS = {"bf16": "#777777", "bf16_once": "#d9a441", "fp8": "#7fb07f", "fp8_once": "#3b6ea8"}


def draw(report: dict, path: pathlib.Path) -> None:
    """Plots bytes and time of the legs, and for how much of the time products wait for links, against the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    model = report["direct"]
    sizes = model["sizes"]
    ranks = [size["ep"] for size in sizes]
    first_extrapolated = min(size["ep"] for size in sizes if size["extrapolated"])
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.8))
    for name, title in WIRES.items():
        wires = [size["wires"][name] for size in sizes]
        how = {"color": COLORS[name], "marker": "o", "markersize": 4, "label": title}
        if name != "bf16":
            base = [size["wires"]["bf16"]["bytes"] for size in sizes]
            left.plot(ranks, [wire["bytes"] / one for wire, one in zip(wires, base, strict=True)], **how)
        middle.plot(ranks, [wire["seconds"] * 1e3 for wire in wires], **how)
        if name in ("bf16", "fp8_once"):
            right.plot(ranks, [100 * wire["exposed"] for wire in wires], **(how | {"label": f"{title}, one after the other"}))
            overlapped = how | {"label": f"{title}, overlapped", "linestyle": "--", "fillstyle": "none"}
            right.plot(ranks, [100 * wire["exposed_overlapped"] for wire in wires], **overlapped)
    forwarded = [size["wires"]["fp8_once"]["seconds"] * 1e3 for size in report["forwarded"]["sizes"]]
    middle.plot(ranks, forwarded, color=COLORS["fp8_once"], linestyle=":", marker="s", markersize=4, label="FP8 once, forwarded")
    middle.plot(ranks, [size["products_seconds"] * 1e3 for size in sizes], color="#444444", linestyle="--", label="products")
    left.set(title="bytes of the four legs", ylabel="of bf16 with a row per expert", ylim=(0, 1.05))
    middle.set(title="time of the four legs", ylabel="ms", ylim=(0, None))
    right.set(title="share of the time in which products wait for links", ylabel="percent", ylim=(0, 100))
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(one) for one in ranks], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("EP (ranks)")
        axes.axvspan(first_extrapolated / 2**0.5, ranks[-1] * 2**0.5, color="#eeeeee", zorder=0)
        axes.text(0.99, 0.02, "extrapolated", transform=axes.transAxes, fontsize=8, color="#666666", ha="right", va="bottom")
        axes.set_xlim(ranks[0] / 2**0.5, ranks[-1] * 2**0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    figure.suptitle(about(model), fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
