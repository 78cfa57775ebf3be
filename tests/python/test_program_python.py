"""The program starts Python without a shell, so the name of the Python to start is never run as a shell command."""

import pytest

from program import ROOT, micro, run


@pytest.mark.parametrize("name", ["it's python", "$(touch pwned)", "x'; touch pwned; '", "a b"])
def test_the_name_of_a_python_is_no_command(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    python = tmp_path / name
    python.write_text(f"#!/bin/sh\necho '{ROOT}/docs'\n")
    python.chmod(0o755)
    flags = {**micro(tmp_path / "run", steps=1), "data": None}
    done = run("train", env={"MOXIE_PYTHON": str(python)}, **flags)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "pwned").exists()


def test_what_is_no_python_is_named_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {**micro(tmp_path / "run", steps=1), "data": None}
    done = run("train", env={"MOXIE_PYTHON": "x'; touch pwned; '"}, **flags)
    assert done.returncode == 2 and "there is no such program" in done.stderr
    assert not (tmp_path / "pwned").exists()
