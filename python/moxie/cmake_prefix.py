"""Prints the folder in which find_package(Moxie) finds the C++ library that was installed with this package:

cmake -DCMAKE_PREFIX_PATH="$(python -m moxie.cmake_prefix)" ...
"""

import pathlib
import sys

import moxie


def cmake_prefix_path() -> str:
    """The folder for CMAKE_PREFIX_PATH."""
    for folder in moxie.__path__:  # an editable installation has two
        if pathlib.Path(folder, "lib", "cmake", "Moxie", "MoxieConfig.cmake").is_file():
            return folder
    raise FileNotFoundError(
        f"moxie.cmake_prefix: {pathlib.Path(__file__).parent} holds no C++ library, because it is the package of a source tree. "
        "Run `pip install .` there, or `cmake --install` of a build folder, and give that prefix."
    )


if __name__ == "__main__":
    try:
        print(cmake_prefix_path())
    except FileNotFoundError as error:
        sys.exit(str(error))
