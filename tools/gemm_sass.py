#!/usr/bin/env python3
"""Prints the compiled code of the Hopper GEMM: spills, and instructions of each step.

    tools/gemm_sass.py build/cuda/moxie/core/libmoxie_core.a

A step begins after a product (four QGMMA) and ends with the next product. Product and sum of an FMA should be in registers of
different parity: with the same parity both are in one register bank, which costs 2 to 3 % of the kernel's speed. Any change of
the kernel, also of the scheduler warp, may change the compiler's choice, so run this before and after.
docs/kernels/grouped_gemm.md has the details.
"""

import pathlib
import re
import shutil
import subprocess
import sys

PRODUCT = range(24, 88)  # the registers that wgmma writes in these kernels
FMA = re.compile(r"FFMA R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+)")
SUMS = 64  # per thread


def kernels(path: pathlib.Path) -> dict[str, list[str]]:
    """The instructions of each GEMM kernel, by its demangled template arguments."""
    text = subprocess.run(["cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
    found = {}
    for function in re.split(r"\n\s+Function : ", text)[1:]:
        name = re.match(r"\S*gemm_kernel\S*GemmTileILNS_6RaggedE(\d)ELi(\d)EEE(\S)", function)
        if name:
            pass_name = "grouped_mm" if name[1] == "0" else "grouped_wgrad"
            out = "f32" if name[3] == "f" else "bf16"
            found[f"{pass_name} {64 * int(name[2])} rows {out}"] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", function)
    return found


def steps(instructions: list[str]) -> list[tuple[int, int]]:
    """For each step: its instructions, and how many of its FMAs have product and sum in registers of the same parity."""
    products = [i for i, text in enumerate(instructions) if "QGMMA" in text]
    found = []
    for before, last in zip(products[3::4], products[7::4]):
        step = instructions[before + 1 : last + 1]
        fmas = [tuple(map(int, match.groups())) for match in map(FMA.search, step) if match]
        if len(fmas) == SUMS:
            same = sum((a if a in PRODUCT else b) % 2 == total % 2 for a, b, total in fmas)
            found.append((len(step), same))
    return found


def main() -> int:
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_file():
        print(__doc__, file=sys.stderr)
        return 2
    if not shutil.which("cuobjdump"):
        print("gemm_sass: needs cuobjdump, which comes with nvcc, in PATH", file=sys.stderr)
        return 1
    found = kernels(pathlib.Path(sys.argv[1]))
    if not found:
        print(f"gemm_sass: no Hopper GEMM in {sys.argv[1]}; it is in builds with CUDA", file=sys.stderr)
        return 1
    for name, instructions in sorted(found.items()):
        spills = sum("LDL" in text or "STL" in text for text in instructions)
        listed = ", ".join(f"{count} ({same} of {SUMS} in one bank)" for count, same in steps(instructions))
        print(f"{name}: {spills} spills; instructions of steps: {listed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
