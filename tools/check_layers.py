#!/usr/bin/env python3
"""Checks rules that a compiler does not: which folders may include which, and limits of every source file.

    moxie/core     includes neither torch nor, outside of MOXIE_CUDA, CUDA;
                   base <- format <- ptx, layout <- simd, tile <- the ops;
                   no two headers have the same name, except for backends.h
    moxie/torch    includes core's contracts, not a folder's backends.h;
                   code below the dispatcher (ops, plan, gemm) does not call ops through it
    both           no cycles between rooms, direct or indirect: a room is a folder, or a header
                   and source of the same name
    moxie/cli      includes core's contracts, and nothing of simd, ptx or tile
    python         holds no C++ sources
Everywhere: includes from the repository's root, asm only in moxie/core/ptx, no std::regex, ASCII,
at most 600 lines.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_LINES = 600
CPP = {".h", ".cc", ".inc", ".cu", ".cuh"}
SOURCES = CPP | {".py", ".sh", ".cmake", ".txt", ".md", ".toml", ".json", ".yml"}

TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h")
CUDA = re.compile(r"cuda|cooperative_groups|(cub|thrust|cutlass|cute|nv)/|cublas|curand|nvtx|mma")
# The folders of moxie/core below the ops, and which other folders of it each may include.
CORE_BELOW = {
    "base": set(),
    "format": {"base"},
    "layout": {"base", "format"},
    "ptx": {"base", "format"},
    "simd": {"base", "format", "layout"},
    "tile": {"base", "format", "layout", "ptx"},
}

# Headers for calling ops through torch's dispatcher, and the folders of moxie/torch that it calls, which must not use them.
DISPATCHER = ("moxie/torch/ops.h", "moxie/torch/dispatch.h")
BELOW_DISPATCHER = ("ops", "plan", "gemm")

INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]+)[">]')
CONDITIONAL = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)")
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def files() -> list[pathlib.PurePosixPath]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = sorted({pathlib.PurePosixPath(name) for name in listed.split("\0") if name})
    return [path for path in paths if path.suffix in SOURCES and (ROOT / path).is_file()]


def includes(text: str):
    """Yields (line number, quote, included file, whether a CPU build sees it)."""
    cuda_only = []  # for each #if around this line: whether its condition is true with CUDA only
    for number, line in enumerate(text.splitlines(), 1):
        if match := CONDITIONAL.match(line):
            word, condition = match.groups()
            if word in ("if", "ifdef", "ifndef"):
                negated = word == "ifndef" or "!" in condition
                of_cuda = bool(re.search(r"MOXIE_CUDA|__CUDACC__", condition))
                cuda_only.append(of_cuda and not negated)
            elif word == "endif":
                cuda_only.pop()
            else:
                cuda_only[-1] = False
        elif match := INCLUDE.match(line):
            yield number, match[1], match[2], not any(cuda_only)


def check_include(path: pathlib.PurePosixPath, quote: str, name: str, on_cpu: bool) -> str | None:
    """The rule that an include of `name` in `path` breaks, if any."""
    folder = path.parent.as_posix()
    if quote == '"' and not name.startswith(("moxie/", "tests/")):
        return "includes of our own start at the repository's root: moxie/... or tests/..."
    private = name.endswith("/backends.h") and folder != name.removesuffix("/backends.h")
    if private and path.parts[0] != "tests":
        return "backends.h is private to its folder"
    if path.parts[:2] == ("moxie", "core"):
        if TORCH.match(name) or name.startswith(("moxie/torch/", "moxie/cli/")):
            return "moxie/core includes nothing of the layers above it"
        if quote == "<" and CUDA.match(name) and on_cpu and path.suffix not in (".cu", ".cuh"):
            return "a CUDA header that a CPU build would need (guard it with #ifdef MOXIE_CUDA)"
        part = path.parts[2]
        if part in CORE_BELOW and name.startswith("moxie/core/"):
            allowed = CORE_BELOW[part] | {part}
            if name.split("/")[2] not in allowed:
                return f"moxie/core/{part} includes of core only {', '.join(sorted(allowed))}"
    if path.parts[:2] == ("moxie", "torch"):
        if name.startswith("moxie/cli/"):
            return "moxie/torch does not include moxie/cli"
        if path.parts[2] in BELOW_DISPATCHER and name in DISPATCHER:
            return f"moxie/torch/{path.parts[2]} is below the dispatcher and does not call through it"
    inside = name.startswith(("moxie/core/simd/", "moxie/core/ptx/", "moxie/core/tile/"))
    if path.parts[:2] == ("moxie", "cli") and inside:
        return "moxie/cli includes core's contracts, not its insides"
    return None


def check(path: pathlib.PurePosixPath):
    """Yields (line number, broken rule)."""
    data = (ROOT / path).read_bytes()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.isascii():
            yield number, "ASCII only"
    text = data.decode(errors="replace")
    count = text.count("\n")
    if count > MAX_LINES and path.suffix != ".md":
        yield count, f"{count} lines; {MAX_LINES} is the limit"
    if path.suffix not in CPP:
        return
    if path.parts[0] == "python":
        yield 1, "python/ holds no C++"
    for number, quote, name, on_cpu in includes(text):
        if rule := check_include(path, quote, name, on_cpu):
            yield number, f"{name}: {rule}"
    code = NOT_CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(code.splitlines(), 1):
        in_ptx = path.parts[:3] == ("moxie", "core", "ptx")
        if re.search(r"\b(asm|__asm__|__asm)\b", line) and not in_ptx:
            yield number, "asm lives in moxie/core/ptx"
        if re.search(r"std::w?regex|#\s*include\s*<regex>", line):
            yield number, "no std::regex"


def room_of(name: str) -> str | None:
    """The room of a file: moxie/core/gemm for moxie/core/gemm/gemm_kernel.cuh, moxie/torch/recipe.h for moxie/torch/recipe.cc."""
    parts = name.split("/")
    if parts[:2] not in (["moxie", "core"], ["moxie", "torch"]) or len(parts) < 3:
        return None
    return "/".join(parts[:3]) if len(parts) > 3 else name.rsplit(".", 1)[0] + ".h"


def cycles(checked: list[pathlib.PurePosixPath]):
    """Yields (path, line number, broken rule) for each include that closes a cycle of rooms."""
    edges: dict[str, dict[str, tuple]] = {}  # room -> room that it includes -> where it does
    for path in checked:
        room = room_of(path.as_posix())
        if path.suffix not in CPP or room is None:
            continue
        for number, _, name, _ in includes((ROOT / path).read_text(errors="replace")):
            other = room_of(name)
            if other not in (None, room):
                edges.setdefault(room, {}).setdefault(other, (path, number, name))

    def reaches(start: str, goal: str) -> list[str]:
        """The rooms on the shortest path of includes from start to goal; empty if there is none."""
        ways, seen = [[start]], {start}
        for way in ways:
            if way[-1] == goal:
                return way
            for after in edges.get(way[-1], {}):
                if after not in seen:
                    seen.add(after)
                    ways.append([*way, after])
        return []

    for room in edges:
        for other, (path, number, name) in edges[room].items():
            if way := reaches(other, room):
                yield path, number, f"{name}: a circle of rooms, {' -> '.join([room, *way])}"


def same_names(checked: list[pathlib.PurePosixPath]):
    """Yields (path, line number, broken rule) for each header of core whose name is not unique."""
    first: dict[str, pathlib.PurePosixPath] = {}
    for path in checked:
        if path.parts[:2] != ("moxie", "core") or path.suffix not in (".h", ".cuh") or path.name == "backends.h":
            continue
        if (other := first.setdefault(path.name, path)) != path:
            yield path, 1, f"{other} has the same file name"


def main() -> int:
    checked = files()
    broken = [f"{path}:{number}: {rule}" for path in checked for number, rule in check(path)]
    broken += [f"{path}:{number}: {rule}" for found in (cycles, same_names) for path, number, rule in found(checked)]
    print("\n".join([*broken, f"check_layers: {len(checked)} files, {len(broken)} broken rules"]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
