"""The tables of the engines of expert parallelism that bench/publish.py puts into docs/EXPERT_PARALLEL.md."""

from doc_tables import about, median_of, table_of

KERNELS = {"gather_kernel": "gathering rows", "combine_kernel": "weighted sum"}


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


def c10d_table(report: dict) -> str:
    """One process with all experts over NCCL: what the engine c10d adds to the local layer, beside NCCL alone and one pass per
    leg."""
    rows = []
    for row in report["rows"]:
        if row["name"] == "c10d":
            added, nccl, passes = (row[name] for name in ("added_seconds", "nccl_seconds", "pass_seconds"))
            ms = [f"{1e3 * seconds:.2f}" for seconds in (added, nccl, passes)]
            rows.append([" x ".join(map(str, row["shape"])), f"{row['of_local']:.3f}x", *ms, f"{(added - passes) / nccl:.2f}"])
    head = ["tokens x dim x hidden x experts x top-k", "c10d, of local", "added, ms", "NCCL alone, ms"]
    head += ["one pass per leg at 0.8 of a copy, ms", "(added - passes) / NCCL"]
    return table_of(f"{about(report)}. {median_of(report)}", head, rows)
