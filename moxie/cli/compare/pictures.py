"""Draws the pictures of a comparison from the metrics.jsonl of each run; report.py puts them on its page.

Each is drawn twice, for light and for dark pages. Without matplotlib there are none, and the name `matplotlib` is None.
"""

import io
import json
import logging
import os
import re
import secrets
import sys

try:
    import matplotlib
    import numpy

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    matplotlib.use("Agg")
    from matplotlib import colors, pyplot
except ImportError as error:
    matplotlib = None
    print(f"moxie: report.html has no pictures, as {sys.executable} lacks {error.name or 'matplotlib'}; "
          "install matplotlib for it, or name another Python in MOXIE_PYTHON", file=sys.stderr)

NAN = float("nan")
MOST_PANELS = 4  # at most this many layers side by side
THEMES = {  # colours that colour-blind readers can tell apart; the first, grey, is the base of the comparison
    "light": {"page": "#ffffff", "ink": "#1f2328", "faint": "#d0d7de", "layers": ("viridis", 0.0, 0.85),
              "recipes": ["#a3abb4", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00"],
              "less": "#0072b2", "more": "#d55e00"},
    "dark": {"page": "#14171c", "ink": "#e6e8eb", "faint": "#3a4048", "layers": ("viridis", 0.3, 1.0),
             "recipes": ["#7d8791", "#56b4e9", "#f5a623", "#2fd0a0", "#e8a5cc", "#f0e442"],
             "less": "#56b4e9", "more": "#f5a623"},
}
DASHES = ["-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2))]  # line styles, so that recipes can be told apart without colour
MARKERS = "osD^vP"


# ---- what the runs recorded --------------------------------------------------------------------


def number(value):
    return NAN if value is None else float(value)  # in JSON, null stands for NaN and infinity


def read_events(path):
    """The events in a metrics.jsonl. Skips lines that are no events, such as a last line that a kill cut off."""
    events = []
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step"), int):
            events.append(event)
    return events


def write_file(path, data):
    """Writes a file under a temporary name, then renames it: an existing file or link is replaced, not written to."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(3)}.unfinished")
    with open(unfinished, "xb") as file:
        file.write(data)
    os.replace(unfinished, path)


def series(runs, event, field, **where):
    """Returns (steps, a list of values for each run) of a field in these events, at the steps that all runs have."""
    per_run = []
    for run in runs:
        per_run.append({e["step"]: number(e[field]) for e in run["events"]
                        if e["event"] == event and all(e.get(key, False) == value for key, value in where.items())})
    steps = sorted(set.intersection(*(set(run) for run in per_run)))
    return steps, [[run[step] for step in steps] for run in per_run]


def evaluations(runs):
    """series() of the held-out losses during the runs, which all read the same text; without any, of the final ones."""
    on_the_way = series(runs, "eval", "loss", final=False)
    return on_the_way if on_the_way[0] else series(runs, "eval", "loss", final=True)


def smooth(values, width):
    """The running mean of each row over `width` values."""
    values = numpy.asarray(values, dtype=float)
    width = max(1, min(width, values.shape[-1]))
    kernel = numpy.ones(width)
    weight = numpy.convolve(numpy.ones(values.shape[-1]), kernel, mode="same")
    return numpy.array([numpy.convolve(row, kernel, mode="same") / weight for row in values])


def layer_of(name):
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else 0


def some_of(items):
    """At most MOST_PANELS of the items, evenly spaced, with the first and the last."""
    last = len(items) - 1
    if last < MOST_PANELS:
        return items
    return [items[round(i * last / (MOST_PANELS - 1))] for i in range(MOST_PANELS)]


# ---- pictures: each function draws one figure, or returns None if there is nothing to show -----


def style(theme):
    matplotlib.rcdefaults()
    matplotlib.rcParams.update({
        "figure.facecolor": theme["page"], "axes.facecolor": theme["page"], "savefig.facecolor": theme["page"],
        "text.color": theme["ink"], "axes.labelcolor": theme["ink"], "axes.titlecolor": theme["ink"],
        "xtick.color": theme["ink"], "ytick.color": theme["ink"], "axes.edgecolor": theme["faint"],
        "axes.grid": True, "grid.color": theme["faint"], "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 11,
        "axes.titlesize": 11, "lines.linewidth": 2, "savefig.dpi": 144, "figure.constrained_layout.use": True,
    })


def line(index, theme, thin=False):
    """The line style of a recipe. The base's line is wider, so that it stays visible under a curve that coincides with it."""
    look = {"color": theme["recipes"][index % len(theme["recipes"])], "linestyle": DASHES[index % len(DASHES)],
            "linewidth": (1 if thin else 2) * (1 if index else 2), "alpha": 0.55 if thin else 1}
    return look if thin else {**look, "marker": MARKERS[index % len(MARKERS)], "markersize": 5 if index else 8}


def draw_loss(recipes, summary, theme):
    figure, axes = pyplot.subplots(figsize=(9, 4.6))
    for index, recipe in enumerate(recipes):
        steps, losses = series(recipe["runs"], "step", "loss")
        if steps:
            trained = smooth(losses, len(steps) // 30).mean(axis=0)
            axes.plot(steps, trained, **line(index, theme, thin=True))
        steps, losses = evaluations(recipe["runs"])
        if steps:
            axes.plot(steps, numpy.mean(losses, axis=0), label=recipe["recipe"], **line(index, theme))
    axes.axhline(summary["bigram_entropy"], color=theme["ink"], linewidth=1, linestyle=":",
                 label="bigram entropy of the text")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.margins(x=0.02)
    axes.legend()
    return figure


def draw_difference(recipes, summary, theme):
    if len(recipes) < 2:
        return None
    figure, axes = pyplot.subplots(figsize=(9, 4))
    axes.axhline(0, label=summary["base"], **{**line(0, theme), "marker": None})
    for index, recipe in enumerate(recipes[1:], 1):
        for event, width in (("step", 10), ("eval", None)):
            runs = recipe["runs"] + recipes[0]["runs"]
            steps, losses = evaluations(runs) if event == "eval" else series(runs, "step", "loss")
            if not steps:
                continue
            losses = smooth(losses, len(steps) // width) if width else numpy.array(losses)
            mine, base = losses[:len(recipe["runs"])], losses[len(recipe["runs"]):]
            percent = 100 * (mine - base) / base
            if event == "step":
                axes.plot(steps, percent.mean(axis=0), **line(index, theme, thin=True))
                continue
            axes.plot(steps, percent.mean(axis=0), label=recipe["recipe"], **line(index, theme))
            axes.fill_between(steps, percent.min(axis=0), percent.max(axis=0), alpha=0.15, linewidth=0,
                              color=line(index, theme)["color"])
    axes.set(xlabel="step", ylabel=f"difference to {short(summary['base'])}, %")
    axes.margins(x=0.02)
    axes.legend()
    return figure


def draw_speed(recipes, summary, theme):
    figure, axes = pyplot.subplots(figsize=(9, 3.4))
    for index, recipe in enumerate(recipes):
        steps, speeds = series(recipe["runs"], "step", "tokens_per_s")
        if steps:
            axes.plot(steps, smooth(speeds, len(steps) // 15).mean(axis=0), label=recipe["recipe"],
                      **{**line(index, theme), "marker": None if len(steps) > 1 else "o"})
    axes.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    axes.margins(x=0.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    axes.legend(loc="lower right")
    return figure


def draw_load(recipes, summary, theme):
    events = [[e for e in recipe["runs"][0]["events"] if e["event"] == "load"] for recipe in recipes]
    layers = some_of(sorted({e["name"] for of_recipe in events for e in of_recipe}, key=layer_of))
    if not layers:
        return None
    figure, grid = pyplot.subplots(len(recipes), len(layers), figsize=(9, 1.2 + 1.7 * len(recipes)), sharex=True,
                                   sharey=True, squeeze=False)
    shades = colors.LinearSegmentedColormap.from_list("load", [theme["less"], theme["page"], theme["more"]])
    for recipe, of_recipe, row in zip(recipes, events, grid):
        for layer, axes in zip(layers, row):
            seen = [e for e in of_recipe if e["name"] == layer]
            axes.grid(False)
            if not seen:
                continue
            counts = numpy.array([e["counts"] for e in seen], dtype=float)
            share = counts / numpy.maximum(counts.sum(axis=1, keepdims=True), 1) * counts.shape[1]
            steps = [e["step"] for e in seen]
            width = (steps[-1] - steps[0]) / max(1, len(steps) - 1) or 1  # the width of an event's column
            image = axes.imshow(share.T, aspect="auto", origin="lower", interpolation="nearest", cmap=shades,
                                norm=colors.TwoSlopeNorm(1, 0, 2),
                                extent=(steps[0] - width / 2, steps[-1] + width / 2, -0.5, counts.shape[1] - 0.5))
            axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3, integer=True))
        row[0].set_ylabel(f"{short(recipe['recipe'])}\nexpert")
    for layer, axes in zip(layers, grid[0]):
        axes.set_title(f"layer {layer_of(layer)}")
    figure.supxlabel("step", fontsize=11)
    bar = figure.colorbar(image, ax=grid, ticks=[0, 1, 2], fraction=0.03, pad=0.02)
    bar.ax.set_yticklabels(["none", "equal\nshare", "twice\nor more"])
    bar.outline.set_visible(False)
    return figure


OPERANDS = {"x": ("w13", 0), "w13": ("w13", 1), "dh": ("w13", 2), "h": ("w2", 0), "w2": ("w2", 1), "dy": ("w2", 2)}


def products_of(runs):
    """The SQNR of operands, as {product: (input, weight, gradient)}, each of them {layer: {step: [one value per run]}}."""
    events = [e for run in runs for e in run["events"] if e["event"] == "quantization"]
    linears = {e["name"] for e in events if e["tensor"] == "weight"}
    products = {}
    for e in events:
        kind = e["name"].rsplit(".", 1)[-1]
        weight, place = OPERANDS.get(e["tensor"], ("", 1))
        product = kind if e["name"] in linears else f"{kind} {weight}"  # a linear has one product, an expert's MLP has two
        layers = products.setdefault(product, ({}, {}, {}))[place]
        layers.setdefault(layer_of(e["name"]), {}).setdefault(e["step"], []).append(number(e["sqnr_db"]))
    return products


def draw_error(recipes, summary, theme):
    rows = [(recipe["recipe"], *row) for recipe in recipes for row in products_of(recipe["runs"]).items()]
    if not rows:
        return None
    last = max(layer for _, _, operands in rows for layers in operands for layer in layers)
    name, low, high = theme["layers"]
    shades = pyplot.get_cmap(name)
    figure, grid = pyplot.subplots(len(rows), 3, figsize=(9, 0.9 + 1.6 * len(rows)), sharex=True, sharey=True,
                                   squeeze=False)
    handles = {}
    for (recipe, product, operands), row in zip(rows, grid):
        for axes, layers in zip(row, operands):
            for layer, values in sorted(layers.items()):
                steps = sorted(values)
                shade = shades(low + (high - low) * layer / max(1, last))
                handles[layer], = axes.plot(steps, [numpy.mean(values[step]) for step in steps], color=shade,
                                            linewidth=1.5, marker="." if len(steps) < 3 else None)
        row[0].set_ylabel(product)
        row[2].annotate(short(recipe), (1.03, 0.5), xycoords="axes fraction", rotation=90, va="center", fontsize=9)
    for axes, title in zip(grid[0], ("input", "weight", "gradient of the output")):
        axes.set_title(title)
    bottom, top = grid[0][0].get_ylim()
    if top - bottom < 6:  # always show at least 6 dB (one bit), so that small differences do not look large
        grid[0][0].set_ylim((bottom + top) / 2 - 3, (bottom + top) / 2 + 3)
    figure.supxlabel("step", fontsize=11)
    figure.supylabel("SQNR, dB", fontsize=11)
    shown = some_of(sorted(handles))
    figure.legend([handles[layer] for layer in shown], [f"layer {layer}" for layer in shown],
                  loc="outside upper right", ncols=len(shown))
    return figure


def short(recipe):
    return recipe if len(recipe) <= 18 else recipe[:16] + ".."


# name, heading, function that draws it, caption that says how to read it
PICTURES = [
    ("loss", "Loss", draw_loss,
     "Lower is better. Thin lines: the loss of the training batches, smoothed; lines with marks: the loss of held-out "
     "text on the way (the table's, at the end, reads more of it). All are means over the seeds. Below the dotted line a "
     "model knows more than which byte follows which."),
    ("difference", "Difference to the base", draw_difference,
     "Above 0 a recipe loses to the base, below it wins. Runs of the same seed are compared with each other, as they "
     "begin with the same weights and see the same data. Lines with marks: held-out text, mean over the seeds, shaded "
     "from the lowest seed to the highest; thin lines: the training batches, smoothed."),
    ("speed", "Tokens per second", draw_speed,
     "Higher is better; smoothed, means over the seeds."),
    ("load", "Expert load", draw_load,
     "Of the first seed. A column is one step, a row one expert, and the colour the share of tokens that the router "
     "sent there: nothing to see is an equal share. A row that keeps its colour is an expert that stays over- or "
     "underused."),
    ("error", "Quantization error", draw_error,
     "The signal-to-quantization-noise ratio of the operands of each product that a recipe quantizes, by layer, mean "
     "over the seeds. Higher is better; 6 dB are one bit. A line that falls names what outgrows the format."),
]


def draw_pictures(recipes, summary, folder):
    """Draws all pictures, writes them to the folder, and returns them as {name: {theme: PNG bytes}}."""
    drawn = {}
    if folder.is_symlink():
        sys.exit(f"moxie: cannot write {str(folder)!a}: it is a link, and a comparison writes inside its own folder alone")
    folder.mkdir(exist_ok=True)
    for key, theme in THEMES.items():
        style(theme)
        for name, _, draw, _ in PICTURES:
            figure = draw(recipes, summary, theme)
            if figure is None:
                continue
            path = folder / (f"{name}.png" if key == "light" else f"{name}-{key}.png")
            png = io.BytesIO()
            figure.savefig(png, format="png")
            pyplot.close(figure)
            write_file(path, png.getvalue())
            drawn.setdefault(name, {})[key] = png.getvalue()
    return drawn
