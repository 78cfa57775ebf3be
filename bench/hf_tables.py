"""The table of stock models of transformers that bench/publish.py puts into docs/HUGGING_FACE.md."""

from doc_tables import about, median_of, table_of

STOCK = "grouped_mm"
NAMES = {"mixtral": "Mixtral-8x7B", "qwen3": "Qwen3-30B-A3B"}


def best_of(rows: list[dict], model: str) -> dict[str, dict]:
    """The faster of eager and compiled of each line of a model; lines that could not run are left out."""
    best: dict[str, dict] = {}
    for row in rows:
        if row["model"] == model and "seconds" in row:
            known = best.setdefault(row["line"], row)
            best[row["line"]] = min(known, row, key=lambda one: one["seconds"]["median"])
    return best


def speed_table(report: dict) -> str:
    rows = []
    for model in dict.fromkeys(row["model"] for row in report["rows"]):
        best = best_of(report["rows"], model)
        stock = best[STOCK]
        for line in dict.fromkeys(row["line"] for row in report["rows"]):
            found = {row["mode"]: row for row in report["rows"] if (row["model"], row["line"]) == (model, line)}
            if line not in best:
                continue
            ms = [
                f"{1e3 * found[mode]['seconds']['median']:.1f}" if "seconds" in found.get(mode, {}) else ""
                for mode in ("eager", "compiled")
            ]
            row = best[line]
            times = f"{stock['seconds']['median'] / row['seconds']['median']:.2f}x"
            memory = f"{row['peak_gib']:.1f}; {row['peak_gib'] / stock['peak_gib']:.2f}x" if "peak_gib" in row else ""
            rows.append([f"{NAMES[model]}, {report['layers'][model][0]} layers", line, *ms, times, memory])
    batch, length = report["tokens"]
    caption = f"{about(report)}, transformers {report['transformers']}, {batch} x {length} tokens. {median_of(report)}"
    head = ["shapes of", "experts", "eager, ms", "compiled, ms", f"of the best of `{STOCK}`", "peak GiB; of its"]
    return table_of(caption, head, rows, words=2)
