#!/usr/bin/env python3
"""Writes the cost model of expert parallelism as tables and a picture; bench/publish.py puts them into docs/COST_MODEL.md.

    bench/exchange_cost.py [--program build/cpu/bin/moxie]

Nothing is measured here: the program computes it, and results/cost-model/exchange.json keeps it.
"""

import argparse
import json
import pathlib
import subprocess

import exchange_tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "cost-model" / "exchange.json"
FORWARDED = ("--path", "forwarded")
LIMITED = ("--groups", "8", "--kept-groups", "4")


def ask(program: pathlib.Path, *flags: str) -> dict:
    return json.loads(subprocess.run([program, "info", "--ep", "--json", *flags], check=True, capture_output=True).stdout)


def report_of(program: pathlib.Path) -> dict:
    return {
        "command": "bench/exchange_cost.py",
        "direct": ask(program),
        "forwarded": ask(program, *FORWARDED),
        "limited": ask(program, *LIMITED),
        "published": ask(program, "--published"),
    }


def as_text(part: dict, indent: str = " ") -> str:
    """Formats JSON with a line for each value and for each element of a list, so that diffs are short."""
    lines = []
    for key, value in part.items():
        if isinstance(value, dict) and any(isinstance(one, list) for one in value.values()):
            text = as_text(value, f"{indent} ")
        elif isinstance(value, list):
            text = "[\n" + ",\n".join(f"{indent} {json.dumps(one)}" for one in value) + f"\n{indent}]"
        else:
            text = json.dumps(value)
        lines.append(f"{indent}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent[1:]}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build" / "cpu" / "bin" / "moxie")
    report = report_of(parser.parse_args().program)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(as_text(report) + "\n")
    for table in exchange_tables.TABLES.values():
        print(f"{table(report)}\n")
    exchange_tables.draw(report, ROOT / "docs" / "pictures" / exchange_tables.PICTURE)


if __name__ == "__main__":
    main()
