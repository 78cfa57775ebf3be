# Finds libtorch, checks its version and gives the imported target Moxie::libtorch, and
# MOXIE_TORCH_CUDA: the CUDA version torch was built with, or nothing. Looks in this order:
#   1. MOXIE_TORCH_PREFIX, a folder that holds include/torch and lib/libtorch.so
#   2. CMAKE_PREFIX_PATH, when it holds such a folder
#   3. the torch of Python3_EXECUTABLE or Python_EXECUTABLE
#   4. for an installed Moxie, the torch beside it (a wheel's) or the one that it was built with
#   5. the torch of another Python: the one `make setup` chose, else .venv's, else python3
# An installed Moxie takes no torch of another minor version than it was built with.
#
# torch's own TorchConfig.cmake is read, not included. For a CUDA build of torch it enables the CUDA
# language, searches the toolkit and sets architecture flags; Moxie's torch layer is plain C++ and
# must build with any torch, with or without a toolkit.
set(MOXIE_TORCH_PREFIX "" CACHE PATH "Folder of libtorch (empty: take it from Python)")

# MOXIE_TORCH_OLDEST and MOXIE_TORCH_NEWEST come from the Python package, which must know them at run
# time; MoxieConfig.cmake sets them for those who use an installed Moxie.
if(NOT MOXIE_TORCH_OLDEST)
  set(versions ${CMAKE_CURRENT_LIST_DIR}/../python/moxie/_torch_versions.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${versions})
  foreach(name OLDEST NEWEST)
    file(STRINGS ${versions} line REGEX "^${name} = ")
    string(REGEX MATCH "[0-9]+\\.[0-9]+" MOXIE_TORCH_${name} "${line}")
  endforeach()
endif()

# MoxieConfig.cmake reads the property: it gives the reason, or warns.
function(moxie_torch_missing text)
  if(MOXIE_TORCH_OPTIONAL)
    set_property(GLOBAL PROPERTY MOXIE_TORCH_MISSING "${text}")
  else()
    message(FATAL_ERROR "${text}")
  endif()
endfunction()

# Asks the interpreter where its torch is, without importing torch.
function(moxie_torch_of_python python out_prefix)
  # An isolated pip build runs the user's own interpreter, with what is installed there hidden by
  # these two variables. Its torch comes first; the build's own is for a user who has none.
  foreach(hide "--unset=PYTHONPATH;--unset=PYTHONNOUSERSITE" "")
    execute_process(
      COMMAND ${CMAKE_COMMAND} -E env ${hide} ${python} -c
        "from importlib import util; print(util.find_spec('torch').submodule_search_locations[0])"
      WORKING_DIRECTORY /  # not a folder that happens to hold one named torch
      OUTPUT_VARIABLE prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(prefix)
      break()
    endif()
  endforeach()
  set(${out_prefix} "${prefix}" PARENT_SCOPE)
endfunction()

# The interpreter of a checkout, or whatever PATH has.
function(moxie_default_python out_python)
  set(root ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
  if(EXISTS ${root}/build/python)
    file(STRINGS ${root}/build/python python LIMIT_COUNT 1)
  elseif(EXISTS ${root}/.venv/bin/python)
    set(python ${root}/.venv/bin/python)
  else()
    find_program(MOXIE_PYTHON3 NAMES python3 python)
    set(python ${MOXIE_PYTHON3})
  endif()
  set(${out_python} "${python}" PARENT_SCOPE)
endfunction()

# The version and CUDA version of the torch in a folder, from the file that has them: version.py
# beside include/ in a wheel, build-version in a libtorch archive.
function(moxie_torch_version prefix out_version out_cuda)
  set(version "")
  set(cuda "")
  if(EXISTS ${prefix}/version.py)
    file(STRINGS ${prefix}/version.py line REGEX "^__version__ *=")
    string(REGEX MATCH "[0-9]+\\.[0-9]+[.0-9]*" version "${line}")
    file(STRINGS ${prefix}/version.py line REGEX "^cuda[ :].*['\"]")
    string(REGEX MATCH "[0-9]+\\.[0-9]+" cuda "${line}")
  elseif(EXISTS ${prefix}/build-version)
    file(STRINGS ${prefix}/build-version line LIMIT_COUNT 1)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+[.0-9]*" version "${line}")
    string(REGEX MATCH "\\+cu([0-9]+)([0-9])$" line "${line}")
    if(line)
      set(cuda ${CMAKE_MATCH_1}.${CMAKE_MATCH_2})
    endif()
  endif()
  set(${out_version} "${version}" PARENT_SCOPE)
  set(${out_cuda} "${cuda}" PARENT_SCOPE)
endfunction()

function(moxie_add_libtorch prefix)
  find_library(MOXIE_LIBTORCH_CPU torch_cpu PATHS ${prefix}/lib NO_DEFAULT_PATH NO_CACHE)
  find_library(MOXIE_LIBC10 c10 PATHS ${prefix}/lib NO_DEFAULT_PATH NO_CACHE)
  set(include_dirs ${prefix}/include ${prefix}/include/torch/csrc/api/include)
  if(NOT MOXIE_LIBTORCH_CPU OR NOT MOXIE_LIBC10 OR NOT EXISTS ${prefix}/include/torch/library.h)
    moxie_torch_missing(
      "${prefix} lacks include/torch/library.h, lib/libtorch_cpu.so or lib/libc10.so.")
    return()
  endif()

  # What torch was compiled with and its headers must see again: the ABI of std::string, and
  # USE_DISTRIBUTED and its like.
  set(definitions "")
  set(config_dir ${prefix}/share/cmake)
  file(STRINGS ${config_dir}/Torch/TorchConfig.cmake line REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  if(line MATCHES "(_GLIBCXX_USE_CXX11_ABI=[01])")
    list(APPEND definitions ${CMAKE_MATCH_1})
  endif()
  file(STRINGS ${config_dir}/Caffe2/Caffe2Targets.cmake line REGEX "COMPILE_DEFINITIONS \"USE_")
  if(line MATCHES "DEFINITIONS \"([A-Z0-9_\\;]+)\"")
    list(APPEND definitions ${CMAKE_MATCH_1})
  endif()

  # A program keeps every library it links, whether or not it calls into it: operators register
  # themselves when loaded, and libmoxie_torch.so has no path of its own to torch. A library leaves
  # torch's CUDA half to its program, or to Python.
  set(cuda_libs "")
  foreach(name torch_cuda c10_cuda)
    if(EXISTS ${prefix}/lib/lib${name}.so)
      string(APPEND cuda_libs ",${prefix}/lib/lib${name}.so")
    endif()
  endforeach()

  add_library(Moxie::libtorch INTERFACE IMPORTED)
  set_target_properties(Moxie::libtorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${include_dirs}"
    INTERFACE_COMPILE_DEFINITIONS "${definitions}"
    INTERFACE_LINK_LIBRARIES "${MOXIE_LIBTORCH_CPU};${MOXIE_LIBC10}"
    INTERFACE_LINK_OPTIONS
      "$<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:LINKER:--no-as-needed${cuda_libs}>")
endfunction()

if(NOT TARGET Moxie::libtorch)
  set(needed "torch ${MOXIE_TORCH_OLDEST} or later")
  set(where "MOXIE_TORCH_PREFIX")
  set(prefix "${MOXIE_TORCH_PREFIX}")
  if(NOT prefix)
    set(where "CMAKE_PREFIX_PATH")
    unset(prefix)  # find_path leaves a variable alone that has a value, even an empty one
    # ../..: torch.utils.cmake_prefix_path is share/cmake inside the folder that is meant.
    find_path(prefix include/torch/library.h PATHS ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH
      PATH_SUFFIXES . ../.. NO_DEFAULT_PATH NO_CACHE)
  endif()
  if(NOT prefix AND (Python3_EXECUTABLE OR Python_EXECUTABLE))
    set(where "${Python3_EXECUTABLE}")
    if(NOT where)
      set(where "${Python_EXECUTABLE}")
    endif()
    moxie_torch_of_python("${where}" prefix)
  elseif(NOT prefix)
    foreach(candidate ${MOXIE_TORCH_BESIDE} ${MOXIE_TORCH_BUILT_PREFIX})
      if(NOT prefix AND EXISTS ${candidate}/include/torch/library.h)
        set(where "where Moxie was built")
        set(prefix ${candidate})
      endif()
    endforeach()
    if(NOT prefix)
      moxie_default_python(where)
      moxie_torch_of_python("${where}" prefix)
    endif()
  endif()
  if(prefix)
    cmake_path(ABSOLUTE_PATH prefix NORMALIZE)
    moxie_torch_version(${prefix} version MOXIE_TORCH_CUDA)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" built "${MOXIE_TORCH_BUILT_VERSION}")
    if(version VERSION_LESS MOXIE_TORCH_OLDEST)
      moxie_torch_missing("Moxie needs ${needed}; ${prefix} holds '${version}' (from ${where}).")
    elseif(built AND NOT minor VERSION_EQUAL built)
      string(CONCAT text "this Moxie was built with torch ${MOXIE_TORCH_BUILT_VERSION}, and ${prefix} "
        "holds torch ${version} (from ${where}). Give -DPython3_EXECUTABLE=<a Python with torch "
        "${built}> or -DMOXIE_TORCH_PREFIX=<the folder of torch ${built}>, or build and install "
        "Moxie again with torch ${version}.")
      moxie_torch_missing("${text}")
    else()
      set(MOXIE_TORCH_VERSION ${version})
      set(MOXIE_TORCH_FOUND_PREFIX ${prefix})
      if(minor VERSION_GREATER MOXIE_TORCH_NEWEST)
        message(WARNING "Moxie is tested with torch ${MOXIE_TORCH_OLDEST} to "
          "${MOXIE_TORCH_NEWEST}; ${prefix} holds ${version}. Going on with it.")
      endif()
      message(STATUS "torch ${version}, CUDA '${MOXIE_TORCH_CUDA}': ${prefix}")
      moxie_add_libtorch(${prefix})
    endif()
  else()
    string(CONCAT text "Moxie needs ${needed}, and '${where}' has no torch. Install it there, or "
      "give -DPython3_EXECUTABLE=<a Python that has it> or -DMOXIE_TORCH_PREFIX=<its folder>. A "
      "build tool that makes an interpreter of its own needs --no-build-isolation.")
    moxie_torch_missing("${text}")
  endif()
endif()
