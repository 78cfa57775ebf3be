"""Formats results as tables for the documents."""


def source(report: dict) -> str:
    """The command and the commit; the tree may have had changes that were not committed."""
    changes = " with uncommitted changes" if report.get("modified") else ""
    return f"`{report['command']}`, commit `{report['commit'][:10]}`{changes}."


def about(report: dict) -> str:
    machine = report["machine"]
    return f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}, {report['date'][:10]}"


def median_of(report: dict) -> str:
    return f"Median of {report['repetitions']}, {source(report)}"


def table_of(caption: str, head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """A Markdown table: the first `words` columns are text, the others are numbers."""
    rule = "|" + "---|" * words + "--:|" * (len(head) - words)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([caption, "", lines[0], rule, *lines[1:]])
