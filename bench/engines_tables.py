"""The table of the symmetric engine that bench/publish.py puts into docs/EXPERT_PARALLEL.md."""

from doc_tables import about, median_of, table_of

KERNELS = {"send_kernel": "sending tokens", "gather_kernel": "gathering rows", "combine_kernel": "weighted sum"}


def one_process_table(report: dict) -> str:
    """One process with all experts: the layer through the engine beside the local one, and its kernels beside a copy."""
    shapes: dict[tuple[int, ...], dict[str, dict]] = {}
    for row in report["rows"]:
        shapes.setdefault(tuple(row["shape"]), {})[row["name"]] = row
    of_copy = {(tuple(row["shape"]), row["kernel"]): row["of_copy"] for row in report["kernels"]}
    rows = []
    for shape, lines in shapes.items():
        ms = [f"{1e3 * lines[name]['seconds']['median']:.2f}" for name in ("local", "symmetric")]
        shares = [f"{of_copy[shape, kernel]:.2f}" for kernel in KERNELS]
        rows.append([" x ".join(map(str, shape)), *ms, f"{lines['symmetric']['of_local']:.3f}x", *shares])
    copy = f"a copy moves {report['copy_bandwidth'] / 1e12:.2f} TB/s"
    head = ["tokens x dim x hidden x experts x top-k", "local, ms", "symmetric, ms", "of local"]
    head += [f"{name}, of a copy" for name in KERNELS.values()]
    return table_of(f"{about(report)}: {copy}. {median_of(report)}", head, rows)
