"""The installed package: its files, the check of torch's version at import, find_package(Moxie), and the build backend for pip.

Nothing is compiled: the tests install the existing build folder in the layout of a wheel.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pytest
import torch

import moxie
from moxie._torch_versions import OLDEST

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = os.environ.get("MOXIE_LIBRARY")
BUILD = pathlib.Path(LIBRARY).resolve().parents[2] if LIBRARY else None
MINOR = ".".join(torch.__version__.split(".")[:2])

needs_build = pytest.mark.skipif(
    BUILD is None or not (BUILD / "built_with_torch").is_file() or shutil.which("cmake") is None,
    reason="the library is not that of a build folder",
)


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory) -> pathlib.Path:
    """Returns a folder that holds the package as a wheel would install it."""
    site = tmp_path_factory.mktemp("site-packages")
    sources = pathlib.Path(moxie.__file__).parent
    shutil.copytree(sources, site / "moxie", ignore=shutil.ignore_patterns("__pycache__", "lib", "include"))
    done = subprocess.run(
        ["cmake", "--install", str(BUILD), "--prefix", str(site / "moxie")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0 and "cannot find" in done.stderr:
        pytest.skip("not all of the build folder is built")
    assert done.returncode == 0, done.stderr
    return site


def python(site: pathlib.Path, *args: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "MOXIE_LIBRARY"} | {"PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *args], env=env, cwd="/", capture_output=True, text=True, stdin=subprocess.DEVNULL)


@needs_build
def test_the_package_loads_its_own_library_and_holds_headers_and_cmake_files(site_packages):
    done = python(site_packages, "-c", "import moxie; print(moxie.recipe_names(), moxie.cmake_prefix_path, sep='\\n')")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(moxie.recipe_names()), str(site_packages / "moxie")]
    headers = ("include/moxie/torch/ops.h", "include/moxie/core/quantize/quantize.h")
    for path in ("lib/libmoxie_torch.so", "lib/libmoxie_core.a", *headers):
        assert (site_packages / "moxie" / path).is_file(), path
    printed = python(site_packages, "-m", "moxie.cmake_prefix")
    assert printed.stdout.strip() == str(site_packages / "moxie"), printed.stderr


@needs_build
@pytest.mark.parametrize("built, found", (("2.12.1", "2.13.0+cu130"), ("2.13.0", "2.14.1")))
def test_another_torch_than_that_of_the_build_is_refused_with_both_versions(site_packages, tmp_path, built, found):
    shutil.copytree(site_packages / "moxie", tmp_path / "moxie", symlinks=True)
    (tmp_path / "moxie" / "lib" / "built_with_torch").write_text(f"{built}\n")
    done = python(tmp_path, "-c", f"import torch; torch.__version__ = {found!r}; import moxie")
    assert done.returncode != 0
    for part in (
        f"ImportError: this moxie was built with torch {built}, and this is torch {found}",
        "pip install --force-reinstall --no-deps .",
        f"make wheel TORCH=torch=={found.partition('+')[0]}",
        f"pip install torch=={built}",
    ):
        assert part in done.stderr, done.stderr


@needs_build
def test_a_later_patch_of_the_same_torch_is_taken(site_packages):
    done = python(site_packages, "-c", f"import torch; torch.__version__ = '{MINOR}.9+cu130'; import moxie")
    assert done.returncode == 0, done.stderr


@needs_build
def test_an_editable_installation_loads_the_library_beside_its_source_tree(site_packages, tmp_path):
    """`pip install -e .` leaves the Python files in the source tree and gives the package a second folder, for what is built."""
    for name in ("lib", "include"):
        (tmp_path / "moxie").mkdir(exist_ok=True)
        (tmp_path / "moxie" / name).symlink_to(site_packages / "moxie" / name)
    sources = tmp_path / "sources" / "moxie"
    shutil.copytree(site_packages / "moxie", sources, ignore=shutil.ignore_patterns("__pycache__", "lib", "include"))
    code = f"""
import importlib.util, sys
folders = [{str(tmp_path / "moxie")!r}, {str(sources)!r}]
spec = importlib.util.spec_from_file_location("moxie", folders[1] + "/__init__.py", submodule_search_locations=folders)
module = sys.modules["moxie"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.recipe_names(), module.cmake_prefix_path, sep="\\n")
"""
    done = python(tmp_path / "empty", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(moxie.recipe_names()), str(tmp_path / "moxie")]


def test_a_source_tree_says_that_it_holds_no_cpp_library():
    with pytest.raises(FileNotFoundError, match="`pip install .` there"):
        _ = moxie.cmake_prefix_path


# ---- find_package(Moxie) ------------------------------------------------------------------------------------------------------

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES CXX)
find_package(Moxie 0.1 REQUIRED{components})
{rest}"""


def configure(prefix: pathlib.Path, folder: pathlib.Path, *args: str, components: str = " COMPONENTS torch", rest: str = ""):
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(PROJECT.format(components=components, rest=rest))
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), f"-DCMAKE_PREFIX_PATH={prefix}", *args]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, " ".join((done.stdout + done.stderr).split())  # CMake wraps its messages, so join their lines


@pytest.fixture
def other_torch(tmp_path) -> pathlib.Path:
    """A folder that CMake takes for a torch of another minor version."""
    prefix = tmp_path / "other"
    (prefix / "include" / "torch").mkdir(parents=True)
    (prefix / "include" / "torch" / "library.h").touch()
    (prefix / "version.py").write_text("__version__ = '2.99.1+cpu'\n")
    return prefix


@needs_build
def test_find_package_takes_the_torch_that_it_was_built_with(site_packages, tmp_path):
    """find_package(Moxie) finds the torch that Moxie was built with, without being told which Python to use and whatever PATH
    holds."""
    rest = "get_target_property(found Moxie::libtorch INTERFACE_INCLUDE_DIRECTORIES)\nmessage(STATUS ${found})\n"
    code, text = configure(site_packages / "moxie", tmp_path / "project", rest=rest)
    assert code == 0 and str(pathlib.Path(torch.__file__).parent.resolve()) in resolved(text), text


def resolved(text: str) -> str:
    words = text.replace(";", " ").split()
    return " ".join(str(pathlib.Path(word).resolve()) if word.startswith("/") else word for word in words)


@needs_build
def test_find_package_refuses_another_torch_with_both_versions(site_packages, tmp_path, other_torch):
    code, text = configure(site_packages / "moxie", tmp_path / "project", f"-DMOXIE_TORCH_PREFIX={other_torch}")
    assert code != 0
    assert f"this Moxie was built with torch {MINOR}" in text and "holds torch 2.99.1 (from MOXIE_TORCH_PREFIX)" in text
    assert "-DPython3_EXECUTABLE=<a Python with torch" in text


@needs_build
def test_find_package_of_core_looks_for_no_torch(site_packages, tmp_path, other_torch):
    torch_of = f"-DMOXIE_TORCH_PREFIX={other_torch}"
    code, text = configure(site_packages / "moxie", tmp_path / "core", torch_of, components=" COMPONENTS core")
    assert code == 0 and "Moxie::torch" not in text
    code, text = configure(site_packages / "moxie", tmp_path / "any", torch_of, components="")
    assert code == 0 and "Moxie::torch is left out: this Moxie was built with torch" in text and "COMPONENTS core" in text


# ---- the build backend for pip ------------------------------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch):
    """Loads tools/build_backend.py with a stand-in for scikit-build-core that builds nothing: its hooks return the settings that
    they were given and the dependencies that they would write into the metadata."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not in the repository")
    for name in ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.delenv(name, raising=False)
    build = types.ModuleType("scikit_build_core.build")
    build.get_requires_for_build_wheel = build.get_requires_for_build_editable = lambda settings: ["ninja"]

    def hook(folder, settings=None, metadata_directory=None):
        return settings, module.dynamic_metadata({}, {})["dependencies"]

    build.prepare_metadata_for_build_wheel = build.prepare_metadata_for_build_editable = hook
    build.build_wheel = build.build_editable = build.build_sdist = hook
    package = types.ModuleType("scikit_build_core")
    package.build = build
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "tools" / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TORCH = str(pathlib.Path(torch.__file__).parent)
WHEEL_HOOKS = ("prepare_metadata_for_build_wheel", "build_wheel", "prepare_metadata_for_build_editable", "build_editable")


def test_a_build_asks_for_torch_where_the_user_has_none(backend, monkeypatch):
    assert pathlib.Path(backend._torch_of_user()).samefile(TORCH)  # that of this interpreter
    assert backend.get_requires_for_build_wheel() == backend.get_requires_for_build_editable() == ["ninja"]
    monkeypatch.setattr(backend, "_torch_of_user", lambda: "")
    assert backend.get_requires_for_build_wheel() == backend.get_requires_for_build_editable() == ["ninja", f"torch>={OLDEST}"]
    assert backend.get_requires_for_build_wheel({"cmake.define.MOXIE_TORCH_PREFIX": "/opt/libtorch"}) == ["ninja"]


@pytest.mark.parametrize("hook", WHEEL_HOOKS)
def test_a_wheel_requires_the_torch_that_cmake_is_told_to_build_with(backend, hook):
    settings, dependencies = getattr(backend, hook)("out", {"cmake.define.MOXIE_CUDA": "ON"})
    assert dependencies == [f"torch=={MINOR}.*"]
    assert settings["cmake.define.MOXIE_CUDA"] == "ON"
    assert pathlib.Path(settings["cmake.define.MOXIE_TORCH_PREFIX"]).samefile(TORCH)


@pytest.mark.parametrize("hook", WHEEL_HOOKS)
def test_a_wheel_requires_the_torch_of_the_build_where_the_user_has_none(backend, monkeypatch, hook):
    monkeypatch.setattr(backend, "_torch_of_user", lambda: "")
    settings, dependencies = getattr(backend, hook)("out")
    assert dependencies == [f"torch=={MINOR}.*"]
    assert pathlib.Path(settings["cmake.define.MOXIE_TORCH_PREFIX"]).samefile(TORCH)


def test_a_wheel_requires_the_torch_that_is_named(backend, monkeypatch, other_torch):
    named = {"cmake.define.MOXIE_TORCH_PREFIX": str(other_torch)}
    assert backend.build_wheel("out", named) == (named, ["torch==2.99.*"])
    named = {"cmake.args": ["-GNinja", f"-DMOXIE_TORCH_PREFIX:PATH={other_torch}"]}
    assert backend.build_wheel("out", named) == (named, ["torch==2.99.*"])
    (other_torch / "version.py").unlink()
    (other_torch / "build-version").write_text("2.98.0+cu130\n")  # as in an archive of libtorch
    for words in (f"-DMOXIE_CUDA=OFF -DMOXIE_TORCH_PREFIX={other_torch}", f"-DMOXIE_TORCH_PREFIX='{other_torch}' -GNinja"):
        monkeypatch.setenv("CMAKE_ARGS", words)
        assert backend.build_wheel("out") == ({}, ["torch==2.98.*"])
    monkeypatch.delenv("CMAKE_ARGS")
    named = {"cmake.args": f"-DMOXIE_TORCH_PREFIX={other_torch};-DMOXIE_CUDA=OFF"}
    assert backend.build_wheel("out", named) == (named, ["torch==2.98.*"])


@pytest.mark.parametrize("version", ("", "2.9.1"))
def test_a_torch_that_cmake_refuses_is_left_to_its_error(backend, monkeypatch, other_torch, version):
    (other_torch / "version.py").write_text(f"__version__ = '{version}'\n")
    monkeypatch.setattr(backend, "_torch_of_user", lambda: str(other_torch))
    assert backend.build_wheel("out") == ({}, [f"torch>={OLDEST}"])


def test_a_source_distribution_requires_any_torch_that_is_supported(backend):
    backend.build_wheel("out")
    assert backend.build_sdist("out") == (None, [f"torch>={OLDEST}"])
    assert backend.dynamic_wheel({}) == {"dependencies": True}  # its metadata says that a wheel requires something else


def test_documents_have_the_commands_that_there_are():
    if not (ROOT / "docs" / "INSTALL.md").is_file():
        pytest.skip("not in the repository")
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "docs/INSTALL.md"):
        text = (ROOT / document).read_text()
        assert "pip install -v ." in text and "make wheel TORCH=torch==2.13.0 PYTHON=python3.11" in text
        assert "python -m moxie.cmake_prefix" in text
    assert "\nwheel:\n" in makefile and os.access(ROOT / "tools" / "wheel.sh", os.X_OK)
