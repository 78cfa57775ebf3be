"""Writes report.html of a comparison from its compare.json and the metrics.jsonl of each run.

The program `moxie` contains the texts of this file and of pictures.py, and runs them as python -c REPORT FOLDER PICTURES.
Pictures go to FOLDER/pictures and into the page itself. Without matplotlib the page has tables only.
"""

import sys

sys.path = [path for path in sys.path if path]  # removes the current folder, whose files would be imported as modules

import base64
import html
import json
import math
import pathlib
import types

pictures = types.ModuleType("pictures")
exec(compile(sys.argv[2], "pictures.py", "exec"), vars(pictures))

CSS = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1f2328; --faint: #d0d7de; --soft: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --ink: #e6e8eb; --faint: #3a4048; --soft: #9aa4ae; } }
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
       max-width: 60rem; padding: 1.5rem; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2.2rem 0 0.4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--faint); padding: 0.35rem 0.6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { color: var(--soft); font-weight: 600; }
figure { margin: 0; } figcaption, .note { color: var(--soft); max-width: 48rem; }
img { display: block; height: auto; max-width: 100%; margin: 0.4rem 0; } pre { overflow-x: auto; }
"""


def percent(value):
    return f"{value:+.2f} %".replace("-", "&minus;") if math.isfinite(value) else "not finite"


def fixed(value, digits=4):
    value = pictures.number(value)
    return f"{value:.{digits}f}" if math.isfinite(value) else "not finite"


def in_units(value, base, units):
    if not math.isfinite(value):
        return "not finite"
    unit = 0
    while value >= base and unit + 1 < len(units):
        value, unit = value / base, unit + 1
    return f"{value:.{1 if unit else 0}f}{units[unit]}"


def table(header, rows):
    def row(tag, cells):
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>\n"
    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="wide"><table>\n{row("th", header)}{body}</table></div>\n'


def speed_and_memory(item):
    return [in_units(pictures.number(item["tokens_per_s"]), 1000, ["", "k", "M", "B"]),
            in_units(item["peak_memory_bytes"], 1024, [" B", " KiB", " MiB", " GiB", " TiB"])]


def code(recipe):
    return f"<code>{html.escape(recipe['recipe'])}</code>"


def recipe_table(recipes):
    rows = []
    for index, recipe in enumerate(recipes):
        interval = recipe["interval_percent"]
        text = "-" if index == 0 or interval is None else " to ".join(percent(pictures.number(end)) for end in interval)
        rows.append([code(recipe), fixed(recipe["eval_loss"]),
                     "base" if index == 0 else percent(pictures.number(recipe["difference_percent"])), text,
                     *speed_and_memory(recipe)])
    return table(["recipe", "held-out loss", "difference", "95 % interval", "tokens/s", "peak memory"], rows)


def run_table(recipes):
    rows = []
    for index, recipe in enumerate(recipes):
        for run in recipe["runs"]:
            skipped = sum(e["event"] == "not_finite" for e in run["events"])
            rows.append([code(recipe), run["seed"], fixed(run["eval_loss"]),
                         "base" if index == 0 else percent(pictures.number(run["difference_percent"])),
                         f"{run['steps']}" + (f", {skipped} skipped" if skipped else ""),
                         fixed(run["seconds"], 0) + " s", *speed_and_memory(run)])
    return table(["recipe", "seed", "held-out loss", "difference", "steps", "time", "tokens/s", "peak memory"], rows)


def picture(name, heading, how_to_read, forms, alt):
    def uri(data):
        return "data:image/png;base64," + base64.b64encode(data).decode()
    return (f'<h2>{heading}</h2>\n<figure><picture><source srcset="{uri(forms["dark"])}" '
            f'media="(prefers-color-scheme: dark)">\n<img src="{uri(forms["light"])}" alt="{html.escape(alt)}" '
            f'id="{name}"></picture>\n<figcaption>{html.escape(how_to_read)}</figcaption></figure>\n')


def write_page(recipes, summary, drawn):
    seeds = summary["seeds"]
    title = html.escape(", ".join(recipe["recipe"] for recipe in recipes))
    parts = [f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
             '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
             f"<style>{CSS}</style></head><body>\n"
             f"<h1>{title}</h1>\n"
             f"<p>The same model of {in_units(summary['parameters'], 1000, ['', 'k', 'M', 'B'])} parameters, trained "
             f"with each recipe from {seeds} seed{'s' if seeds > 1 else ''} on {html.escape(summary['device'])}.</p>\n",
             recipe_table(recipes),
             f"<p class=\"note\">Losses are in nats per byte of held-out text, means over the seeds; the text's bigram "
             f"entropy is {fixed(summary['bigram_entropy'])}. The difference is (recipe &minus; base) / base, paired by "
             f"seed, with Student's 95 % interval of its mean{'' if seeds > 1 else ' (which takes two seeds)'}.</p>\n"]
    if summary["numerics_only"]:
        parts.append("<p><strong>This ran on a CPU: it shows numerics, not speed.</strong></p>\n")
    for name, heading, _, how_to_read in pictures.PICTURES:
        if name in drawn:
            names = ", ".join(recipe["recipe"] for recipe in recipes)
            alt = f"{heading} over the steps of {names}; the last values are in the tables"
            parts.append(picture(name, heading, how_to_read, drawn[name], alt))
    if pictures.matplotlib is None:
        parts.append('<p class="note">There are no pictures, as matplotlib was not at hand: <code>pip install '
                     "matplotlib</code>, then the same command with --resume.</p>\n")
    parts += ["<h2>Every run</h2>\n", run_table(recipes), "<h2>What was trained</h2>\n<details><summary>The config of "
              f"every run</summary><pre>{html.escape(json.dumps(summary['config'], indent=2))}</pre></details>\n"
              "</body></html>\n"]
    return "".join(parts)


def main(folder):
    summary = json.loads((folder / "compare.json").read_text())
    recipes = summary["recipes"]
    for recipe in recipes:
        for run in recipe["runs"]:
            run["events"] = pictures.read_events(folder / run["folder"] / "metrics.jsonl")
    drawn = pictures.draw_pictures(recipes, summary, folder / "pictures") if pictures.matplotlib else {}
    pictures.write_file(folder / "report.html", write_page(recipes, summary, drawn).encode())


main(pathlib.Path(sys.argv[1]))
