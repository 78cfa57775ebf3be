#!/usr/bin/env python3
"""Runs every test of a build folder and counts.

C++ programs are those that ctest lists; Python tests are the files of tests/python, run with the
library of this build. Each program and each file is a suite in its own process, so that a crash
affects no other suite. The last line is `N passed, M failed, K skipped`; the exit status is 1 if
anything failed or nothing passed.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 3600


@dataclasses.dataclass
class Suite:
    name: str
    command: list[str]  # "{report}" stands for the path of the report
    read_report: "collections.abc.Callable"


@dataclasses.dataclass
class Result:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Result") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.reasons.update(other.reasons)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def read_gtest(path: pathlib.Path, output: str) -> Result:
    result = Result()
    for suite in json.loads(path.read_text())["testsuites"]:
        for case in suite["testsuite"]:
            if case.get("failures"):
                result.failed += 1
            elif case.get("result") == "SKIPPED":
                result.skipped += 1
            elif case.get("status") == "RUN":
                result.passed += 1
    # GoogleTest's report lacks the reasons of skipped tests; its output has them: "<file>:<line>: Skipped\n<reason>".
    result.reasons.update(re.findall(r": Skipped\n(.+)", output))
    return result


def read_junit(path: pathlib.Path, output: str) -> Result:
    del output
    result = Result()
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif skipped is not None:
            result.skipped += 1
            result.reasons[skipped.get("message") or "no reason given"] += 1
        else:
            result.passed += 1
    return result


def cpp_suites(build: pathlib.Path) -> list[Suite]:
    listing = subprocess.run(
        ["ctest", "--test-dir", str(build), "--show-only=json-v1"], check=True, capture_output=True, text=True
    )
    suites = []
    for test in json.loads(listing.stdout)["tests"]:
        if "command" not in test:
            sys.exit(f"test.py: {test['name']} is not built; build {build} first")
        command = [*test["command"], "--gtest_output=json:{report}"]
        suites.append(Suite(test["name"], command, read_gtest))
    return suites


def python_suites(library: pathlib.Path) -> list[Suite]:
    if not library.exists():
        return []
    pytest = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-rs"]
    return [
        Suite(f"python/{path.name}", [*pytest, "--junitxml={report}", str(path)], read_junit)
        for path in sorted((ROOT / "tests" / "python").glob("test_*.py"))
    ]


@dataclasses.dataclass
class Finished:
    suite: Suite
    result: Result
    seconds: float
    output: str  # what the suite printed, if anything in it failed; else empty


def run(suite: Suite, env: dict[str, str]) -> Finished:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report"
        # Inductor's cache knows graphs by the ops in them, not by the library that implements the ops. A shared cache could
        # return a graph that was compiled with another build.
        env = {**env, "TORCHINDUCTOR_CACHE_DIR": str(pathlib.Path(folder) / "inductor")}
        command = [word.replace("{report}", str(report)) for word in suite.command]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                timeout=TIMEOUT_S,
                text=True,
                errors="replace",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode(errors="replace")
            status = f"stopped after {TIMEOUT_S} s"
        try:
            result = suite.read_report(report, output)
        except (OSError, ValueError, KeyError, ElementTree.ParseError):
            # The suite died before it wrote a report: count the results that it printed, and one more failure.
            passed = re.findall(r"^\[       OK \]", output, re.MULTILINE)
            failed = re.findall(r"^\[  FAILED  \].*ms\)$", output, re.MULTILINE)
            result = Result(passed=len(passed), failed=len(failed) + 1)
    nothing_collected = suite.read_report is read_junit and status == 5
    if status != 0 and not result.failed and not nothing_collected:
        result.failed += 1
    failure = f"{output.rstrip()}\n(exit status {status})" if result.failed else ""
    return Finished(suite, result, time.monotonic() - start, failure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path, help="build folder, such as build/cpu")
    parser.add_argument("-k", dest="part", default="", help="only suites whose name holds this")
    parser.add_argument("-j", dest="jobs", type=int, default=1, help="suites that run at a time (1)")
    options = parser.parse_args()

    library = options.build.resolve() / "moxie" / "torch" / "libmoxie_torch.so"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "MOXIE_LIBRARY": str(library)}
    # oneDNN's AMX kernels die with SIGILL in virtual machines that lose tile state at a context switch.
    env.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if options.jobs > 1:
        # OpenMP threads that wait by spinning would take cores from the other suites.
        env.setdefault("OMP_WAIT_POLICY", "passive")
    suites = cpp_suites(options.build) + python_suites(library)
    total = Result()
    with concurrent.futures.ThreadPoolExecutor(max_workers=options.jobs) as pool:
        runs = [pool.submit(run, suite, env) for suite in suites if options.part in suite.name]
        try:
            for done in concurrent.futures.as_completed(runs):
                finished = done.result()
                total.add(finished.result)
                verdict = "FAIL" if finished.result.failed else "ok"
                print(f"{verdict:4} {finished.suite.name:36} {finished.result}  ({finished.seconds:.1f} s)", flush=True)
                if finished.output:
                    print(finished.output, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    for reason, count in total.reasons.most_common():
        print(f"skipped {count}: {reason}")
    print(total)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
