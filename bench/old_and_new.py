#!/usr/bin/env python3
"""Times the kernels of one step of grouped_mm in two builds of the library, in turn.

    bench/old_and_new.py --old OLD/python OLD/libmoxie_torch.so --new python build/cuda/moxie/torch/libmoxie_torch.so
                         [--shape 131072x2048x7168x8] [--cases forward dgrad] [--recipe mxfp8_rceil_128] [--processes 3]
                         [--repetitions 15] [--out FILE]

A build is the folder of its Python package and its library. Each runs in processes of its own, because a process can load one
library only. Two processes, one of each build, are there at the same time, and take turns at every kernel.

The kernels are those that a step launches: a process records the calls of Moxie's ops in one forward and backward, and repeats
each of them. The public grouped_wgrad, which takes operands of a caller, is timed beside them. Groups are Zipf-like.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

import torch

import group_sizes

CALLS = 4  # of a kernel in one turn, of which the first does not count
QUEUE_CYCLES = 4_000_000  # the GPU waits about 2 ms, while the host queues the calls of a turn
SHAPES = ["131072x8192x5120x8", "131072x2048x7168x8", "32768x2048x7168x8", "65536x2048x7168x32"]


# ---- a process of one build --------------------------------------------------------------------------------------------------


def recorded_calls(run):
    """The calls of Moxie's ops in run(), as pairs of an op and its arguments. Calls inside an op do not count."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "moxie":
                calls.append((op, args, kwargs or {}))
            return op(*args, **(kwargs or {}))

    with Recorder():
        run()
    return calls


def role_of(op, args, shape):
    """What a call does in a step; None for an op that is not compared."""
    name = op._schema.name.removeprefix("moxie::")
    for pass_name in ("wgrad", "dgrad"):
        if pass_name in name:
            return pass_name
    if name in ("grouped_mm", "grouped_fwd"):
        return "forward"
    if "quantize" not in name:
        return None
    rows, n, k, groups = shape
    return {(rows, k): "quantize x", (rows, n): "quantize dy", (groups, n, k): "quantize w"}.get(tuple(args[0].shape))


def cases_of(shape, recipe, device):
    import moxie

    rows, n, k, groups = shape
    torch.manual_seed(0)
    random_of = lambda *sizes: torch.randn(*sizes, device=device).to(torch.bfloat16)
    x, w, dy = random_of(rows, k).requires_grad_(), (random_of(groups, n, k) * k**-0.5).requires_grad_(), random_of(rows, n)
    offs = group_sizes.offs_of(group_sizes.zipf(rows, groups), device)
    calls = recorded_calls(lambda: torch.autograd.grad(moxie.grouped_mm(x, w, offs, recipe=recipe), (x, w), dy))
    cases = {}
    for op, args, kwargs in calls:
        role = role_of(op, args, shape)
        if role and (role.startswith("quantize") or isinstance(args[1], torch.Tensor) and "float8" in str(args[0].dtype)):
            cases.setdefault(role, lambda op=op, args=args, kwargs=kwargs: op(*args, **kwargs))
            if role == "wgrad":
                how = {"recipe": recipe, "scale_layout": "plain" if args[1].shape[0] == args[0].shape[0] else "quads"}
                cases["public wgrad"] = lambda args=args, how=how: moxie.grouped_wgrad(*args[:4], rows, offs, **how)
    return cases


def milliseconds_of(call, device):
    if device == "cpu":
        import time

        times = [time.perf_counter()]
        for _ in range(CALLS):
            call()
            times.append(time.perf_counter())
        return [(after - before) * 1e3 for before, after in zip(times[1:], times[2:])]
    torch.cuda._sleep(QUEUE_CYCLES)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) for before, after in zip(events[1:], events[2:])]


def serve(recipe, device):
    """Reads one request per line, a shape or the name of a case, and answers with a line of JSON."""
    cases = {}
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, list):
            cases.clear()
            cases |= cases_of(tuple(request), recipe, device)
            answer = list(cases)
        else:
            answer = milliseconds_of(cases[request], device)
        print(json.dumps(answer), flush=True)


# ---- the process that compares -----------------------------------------------------------------------------------------------


class Build:
    def __init__(self, python, library, options):
        environment = os.environ | {"PYTHONPATH": str(python), "MOXIE_LIBRARY": str(pathlib.Path(library).resolve())}
        command = [sys.executable, __file__, "--serve", options.recipe, options.device]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("old_and_new: a process of a build has ended; its error is above")
        return json.loads(line)

    def ask(self, request):
        self.send(request)
        return self.answer()

    def end(self):
        self._process.stdin.close()
        self._process.wait()


def compare(options, shapes):
    """Milliseconds of each (shape, case): for each build, a list per pair of processes."""
    times = {}
    for pair in range(options.processes):
        builds = {which: Build(*getattr(options, which), options) for which in ("old", "new")}
        for shape in shapes:
            for build in builds.values():
                build.send(shape)
            answers = [build.answer() for build in builds.values()]
            names = [name for name in answers[0] if name in answers[1] and name in (options.cases or answers[0])]
            for name in names:
                both = times.setdefault((tuple(shape), name), {"old": [], "new": []})
                for which in builds:
                    both[which].append([])
            for turn in range(-1, options.repetitions):  # the first does not count
                for name in names:
                    for which in sorted(builds, reverse=(turn + pair) % 2 == 0):
                        laps = builds[which].ask(name)
                        if turn >= 0:
                            times[tuple(shape), name][which][-1] += laps
        for build in builds.values():
            build.end()
    return times


def rows_of(times):
    rows = []
    for (shape, name), both in times.items():
        old, new = (statistics.median(lap for laps in both[which] for lap in laps) for which in ("old", "new"))
        pairs = [statistics.median(a) / statistics.median(b) for a, b in zip(both["old"], both["new"])]
        rows.append({"shape": list(shape), "case": name, "old_ms": old, "new_ms": new, "old_over_new": old / new, "of_pairs": pairs})
    return rows


def main():
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    import harness

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser)
    for which in ("old", "new"):
        parser.add_argument(f"--{which}", nargs=2, required=True, metavar=("PYTHON", "LIBRARY"))
    parser.add_argument("--shape", nargs="+", help="MxNxKxG: x [M, K], w [G, N, K]")
    parser.add_argument("--cases", nargs="+", help="names of the table; default: all")
    parser.add_argument("--recipe", default="mxfp8_rceil_128")
    parser.add_argument("--processes", type=int, default=3, help="of each build")
    options = harness.parse_options(parser)
    shapes = options.shape or (["1024x256x384x4"] if options.quick else SHAPES)
    report = harness.begin_report("bench/old_and_new.py", options)
    report["rows"] = rows_of(compare(options, [list(harness.sizes_of(shape)) for shape in shapes]))
    harness.write_report(report, options, "old_and_new")
    lines = [("M x N x K x G", "case", "old ms", "new ms", "old / new", "of each pair of processes")]
    for row in report["rows"]:
        ratios = " ".join(f"{ratio:.3f}" for ratio in row["of_pairs"])
        numbers = f"{row['old_ms']:.3f}", f"{row['new_ms']:.3f}", f"{row['old_over_new']:.3f}"
        lines.append(("x".join(map(str, row["shape"])), row["case"], *numbers, ratios))
    print(f"{harness.about(report)}; {options.recipe}, medians\n{harness.text_table(lines, left=2)}")


if __name__ == "__main__":
    main()
