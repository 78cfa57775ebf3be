"""The build backend that pip calls: scikit-build-core, which also gets a torch to build against if the user has none.

The library is built against the torch that it will be loaded into. An isolated build sees the user's interpreter with its
packages hidden; cmake/find_torch.cmake and `_torch_of_user` look past that. Where there is no torch, the isolated build gets
the one that pip would install with the wheel, as both ask for the same versions.
"""

import os
import pathlib
import re
import subprocess
import sys
from contextlib import suppress

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  the hooks of a build backend that are not defined below

_ROOT = pathlib.Path(__file__).parents[1]


def _torch_of_user() -> str:
    """The version of torch in the user's environment, or "". Reads metadata only: importing torch would take seconds."""
    hidden = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    code = "from importlib import metadata; print(metadata.version('torch'))"
    done = subprocess.run([sys.executable, "-c", code], env=hidden, cwd="/", capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _torch_required(config_settings) -> list[str]:
    """The torch that pip must install for the build; nothing if the user has one, or names one with MOXIE_TORCH_PREFIX."""
    settings = config_settings or {}
    if _torch_of_user() or any("MOXIE_TORCH_PREFIX" in f"{key}={value}" for key, value in settings.items()):
        return []
    dependency = re.search(r'^dependencies = \["(torch[^"]*)"', (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert dependency
    return [dependency[1]]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*_backend.get_requires_for_build_wheel(config_settings), *_torch_required(config_settings)]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*_backend.get_requires_for_build_editable(config_settings), *_torch_required(config_settings)]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # pip shows no output of a build unless it fails, so this line is written to the terminal directly.
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write("\nmoxie: compiles its library now, which takes minutes; `pip install -v .` shows each file\n")
    return _backend.build_wheel(wheel_directory, config_settings, metadata_directory)
