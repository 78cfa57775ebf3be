"""The build backend that pip calls: scikit-build-core, which also gets a torch to build against if the user has none, and makes
a wheel require the torch that it was built against.

The library is built against the torch that it will be loaded into. An isolated build sees the user's interpreter with its
packages hidden; `_folder_of_torch` looks past that, and CMake is told which folder was found. Where there is no torch, the
isolated build gets the one that pip would install now.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager, suppress

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  the hooks of a build backend that are not defined below

_VERSIONS = pathlib.Path(__file__).parents[1] / "python" / "moxie" / "_torch_versions.py"
_OLDEST = re.search(r'^OLDEST = "([0-9.]+)"', _VERSIONS.read_text(), re.MULTILINE)[1]
_ANY_TORCH = f"torch>={_OLDEST}"
_PREFIX = "MOXIE_TORCH_PREFIX"

_torch = _ANY_TORCH  # what the metadata requires: any torch in a source distribution, one minor version in a wheel


# ---- dependencies, which pyproject.toml asks this module for -------------------------------------------------------------------


def dynamic_metadata(settings, project) -> dict[str, list[str]]:
    return {"dependencies": [_torch]}


def dynamic_wheel(settings) -> dict[str, bool]:
    """Says in the metadata of a source distribution that a wheel of it requires something else."""
    return {"dependencies": True}


# ---- which torch ---------------------------------------------------------------------------------------------------------------


def _torch_of_python(hide: tuple[str, ...]) -> str:
    """The folder of this interpreter's torch, or "". Does not import it, which would take seconds."""
    env = {name: value for name, value in os.environ.items() if name not in hide}
    code = "from importlib import util; print(util.find_spec('torch').submodule_search_locations[0])"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _torch_of_user() -> str:
    """The folder of the torch in the user's environment, or ""; an isolated build hides it with these two variables."""
    return _torch_of_python(hide=("PYTHONPATH", "PYTHONNOUSERSITE"))


def _torch_named(settings) -> str:
    """The folder that the user names with MOXIE_TORCH_PREFIX, or ""."""
    lists = {key: [value] if isinstance(value, str) else value for key, value in settings.items()}
    words = [f"{key}={word}" for key, values in lists.items() for value in values for word in value.split(";")]
    words += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    words += [word for name in ("SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE") for word in os.environ.get(name, "").split(";")]
    found = [re.search(rf"{_PREFIX}(?::\w+)?=(.+)", word) for word in words]
    return next((match[1] for match in found if match), "")


def _minor_version(folder: str) -> str:
    """Reads the version of the torch in a folder, such as "2.13", from the file that find_torch.cmake reads. "" if there is
    none, or one that is refused."""
    for name, pattern in (("version.py", r"^__version__ *= *['\"](\d+)\.(\d+)"), ("build-version", r"^(\d+)\.(\d+)")):
        file = pathlib.Path(folder, name)
        found = re.search(pattern, file.read_text(), re.MULTILINE) if file.is_file() else None
        if found:
            oldest = tuple(map(int, _OLDEST.split(".")))
            return f"{found[1]}.{found[2]}" if (int(found[1]), int(found[2])) >= oldest else ""
    return ""


@contextmanager
def _for_one_torch(config_settings):
    """Gives settings that name the folder of the torch to build against; while inside, the metadata requires its version.
    Where there is none, or one that is too old, CMake says so."""
    global _torch
    settings = dict(config_settings or {})
    named = _torch_named(settings)
    folder = named or _torch_of_user() or _torch_of_python(hide=())
    minor = _minor_version(folder) if folder else ""
    if minor and not named:
        settings[f"cmake.define.{_PREFIX}"] = folder
    try:
        _torch = f"torch=={minor}.*" if minor else _ANY_TORCH
        yield settings
    finally:
        _torch = _ANY_TORCH


def _torch_required(config_settings) -> list[str]:
    """The torch that pip must install for the build; nothing if the user has one, or names one with MOXIE_TORCH_PREFIX."""
    return [] if _torch_named(config_settings or {}) or _torch_of_user() else [_ANY_TORCH]


# ---- the hooks -----------------------------------------------------------------------------------------------------------------


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*_backend.get_requires_for_build_wheel(config_settings), *_torch_required(config_settings)]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*_backend.get_requires_for_build_editable(config_settings), *_torch_required(config_settings)]


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with _for_one_torch(config_settings) as settings:
        return _backend.prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    with _for_one_torch(config_settings) as settings:
        return _backend.prepare_metadata_for_build_editable(metadata_directory, settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # pip shows no output of a build unless it fails, so this line is written to the terminal directly.
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write("\nmoxie: compiles its library now, which takes minutes; `pip install -v .` shows each file\n")
    with _for_one_torch(config_settings) as settings:
        return _backend.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with _for_one_torch(config_settings) as settings:
        return _backend.build_editable(wheel_directory, settings, metadata_directory)
