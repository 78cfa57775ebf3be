"""Prints the folder in which find_package(Moxie) finds the C++ library that was installed with this package:

cmake -DCMAKE_PREFIX_PATH="$(python -m moxie.cmake_prefix)" ...
"""

import pathlib
import sys


def cmake_prefix_path() -> str:
    """The folder for CMAKE_PREFIX_PATH."""
    package = pathlib.Path(__file__).parent
    if not (package / "lib" / "cmake" / "Moxie" / "MoxieConfig.cmake").is_file():
        raise FileNotFoundError(
            f"moxie.cmake_prefix: {package} holds no C++ library, because it is the package of a source tree. Run "
            "`pip install .` there, or `cmake --install` of a build folder, and give that prefix."
        )
    return str(package)


if __name__ == "__main__":
    try:
        print(cmake_prefix_path())
    except FileNotFoundError as error:
        sys.exit(str(error))
