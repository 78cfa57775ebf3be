"""Every ```python block of README.md and docs/ runs, each file from top to bottom in one namespace.

A block after the line <!-- no-test --> is not run. Programs of examples/ run too, for a few steps.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = [path for path in (ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"HUGGING_FACE.md": ("transformers", "peft", "accelerate")}  # packages that a page needs; without them it is skipped
BLOCK = re.compile(r"^(<!-- no-test -->\s*\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(path: pathlib.Path) -> list[tuple[int, str]]:
    """Returns (line of the page on which the code begins, code) for each block to run."""
    text = path.read_text()
    return [(text.count("\n", 0, match.start(2)) + 1, match[2]) for match in BLOCK.finditer(text) if not match[1]]


def test_blocks_are_found_and_marked_ones_left_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n```python\nx = 1\n```\n<!-- no-test -->\n```python\nboom\n```\n```bash\nls\n```\n```python\ny = x\nz = y\n```\n"
    )
    assert snippets(page) == [(3, "x = 1\n"), (13, "y = x\nz = y\n")]


@pytest.mark.parametrize("path", [path for path in FILES if snippets(path)], ids=lambda path: path.name)
def test_snippets_run(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for package in NEEDS.get(path.name, ()):
        pytest.importorskip(package)
    namespace = {"__name__": "__main__"}
    for line, code in snippets(path):
        # Blank lines before the code make errors show line numbers of the page.
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run([sys.executable, str(path), "--steps", "3"], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
