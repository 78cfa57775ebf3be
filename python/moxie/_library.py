"""Loads libmoxie_torch.so, which registers torch.ops.moxie."""

import os
import pathlib
import warnings

import torch
import torch.compiler.config

import moxie
from moxie._torch_versions import NEWEST, OLDEST


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _check_torch() -> None:
    version = _major_minor(torch.__version__)
    if version < _major_minor(OLDEST):
        raise ImportError(
            f"moxie needs torch {OLDEST} or later, and found torch {torch.__version__}. Install a later one, then build "
            "moxie again: it is built for one torch."
        )
    if version > _major_minor(NEWEST):
        warnings.warn(
            f"moxie is tested with torch {OLDEST} to {NEWEST}, and this is torch {torch.__version__}. It may still work; "
            "warnings.filterwarnings('ignore', message='moxie is tested') silences this warning.",
            stacklevel=2,
        )


def _path() -> pathlib.Path:
    """Returns the path of the library: MOXIE_LIBRARY if it is set (to use a build folder), else the library installed with the
    package. An editable installation has two folders: one for the library, and the source tree for the Python files."""
    chosen = os.environ.get("MOXIE_LIBRARY")
    if chosen:
        return pathlib.Path(chosen)
    found = [pathlib.Path(folder) / "lib" / "libmoxie_torch.so" for folder in moxie.__path__]
    return next((path for path in found if path.is_file()), found[-1])


def _check_built_with(path: pathlib.Path) -> None:
    """Refuses a torch version other than the one the library was built with. Without this check, loading would fail with a
    missing symbol, or succeed and crash later. The install writes the version to a file beside the library."""
    file = path.parent / "built_with_torch"
    if not file.is_file():
        return
    built = file.read_text().strip()
    if _major_minor(built) != _major_minor(torch.__version__):
        raise ImportError(
            f"this moxie was built with torch {built}, and this is torch {torch.__version__}: libtorch changes between them. Run "
            "`pip install --force-reinstall --no-deps .` in moxie's repository to build it for this torch (or `make wheel "
            f"TORCH=torch=={torch.__version__.partition('+')[0]}` and install that), or `pip install torch=={built}`."
        )


def load() -> None:
    _check_torch()
    path = _path()
    if not path.is_file():
        raise ImportError(
            f"moxie's library is not at {path}. Run `pip install .` in the repository; or, to use a build folder, "
            "run `make build` and set MOXIE_LIBRARY to its moxie/torch/libmoxie_torch.so."
        )
    _check_built_with(path)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"{path} does not load into torch {torch.__version__}. It was probably built for another torch; build it "
            f"again with this one. The loader says: {error}"
        ) from error
    _tag_compile_cache(path)


def _tag_compile_cache(path: pathlib.Path) -> None:
    """Makes this build of the library part of every key of torch.compile's cache on disk. Otherwise a graph cached with an
    older build could call an op that has changed since.
    """
    file = path.stat()
    config = torch.compiler.config
    config.cache_key_tag = ";".join(filter(None, (config.cache_key_tag, f"moxie-{file.st_size}-{file.st_mtime_ns}")))


load()
