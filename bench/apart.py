"""Processes that get ready side by side, and then measure one after the other, each alone.

Building and compiling take minutes of CPU, a measurement seconds of the GPU. A child calls wait_for_turn() when it is ready.
"""

import subprocess
import sys
import tempfile

READY = "ready"


def wait_for_turn() -> None:
    """In a child: returns when the processes beside this one are quiet."""
    print(READY, flush=True)
    sys.stdin.readline()


class Child:
    def __init__(self, *command: str):
        self.errors = tempfile.TemporaryFile("w+")  # not a pipe, which could fill up
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, *command], text=True, stdin=pipe, stdout=pipe, stderr=self.errors)

    def wait_until_ready(self) -> None:
        """Returns when the child waits for its turn, or has ended."""
        for text in self.process.stdout:
            if text.strip() == READY:
                return

    def finish(self) -> str:
        """Gives the child its turn, and returns what it prints. Raises RuntimeError, with its last error, if it fails."""
        out, _ = self.process.communicate("go\n")
        if self.process.returncode != 0:
            self.errors.seek(0)
            lines = [text.strip() for text in self.errors if "Error" in text.partition(":")[0]]
            raise RuntimeError((lines or [f"exit status {self.process.returncode}"])[-1][:200])
        return out


def in_batches(children: list, jobs: int):
    """Starts `jobs` children at a time (functions that make them), and yields each, ready, in its turn."""
    for begin in range(0, len(children), jobs):
        batch = [start() for start in children[begin : begin + jobs]]
        for child in batch:
            child.wait_until_ready()
        yield from batch
