# moxie_library(), moxie_test() and what find_package(Moxie) finds. Every compiler flag is here.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

find_program(MOXIE_CCACHE ccache)
foreach(lang CXX CUDA)
  if(MOXIE_CCACHE AND NOT DEFINED CMAKE_${lang}_COMPILER_LAUNCHER)
    set(CMAKE_${lang}_COMPILER_LAUNCHER ${MOXIE_CCACHE})
  endif()
endforeach()

set(CMAKE_CXX_EXTENSIONS OFF)  # the standard itself is moxie_flags()' to set
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # moxie_core becomes part of libmoxie_torch.so
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_COLOR_DIAGNOSTICS ON)

# ---- CUDA --------------------------------------------------------------------------------------

if(MOXIE_CUDA AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  # Toolkits are often installed without being on PATH.
  find_program(MOXIE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  if(MOXIE_NVCC)
    set(CMAKE_CUDA_COMPILER ${MOXIE_NVCC})
  endif()
endif()
if(MOXIE_CUDA STREQUAL "AUTO")
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    set(has_nvcc TRUE)
  endif()
  if(has_nvcc AND MOXIE_TORCH_CUDA)
    set(MOXIE_CUDA ON)
  else()
    set(MOXIE_CUDA OFF)
  endif()
  message(STATUS "MOXIE_CUDA is ${MOXIE_CUDA}: torch's CUDA is '${MOXIE_TORCH_CUDA}', "
    "nvcc is '${CMAKE_CUDA_COMPILER}'")
endif()
if(MOXIE_CUDA)
  # Before CMake tries the compiler: what CMake 3.25 would try is an architecture nvcc 13 dropped.
  set(CMAKE_CUDA_ARCHITECTURES ${MOXIE_CUDA_ARCHS})
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()
find_package(Threads REQUIRED)

# ---- flags -------------------------------------------------------------------------------------

# No fast-math, and no contraction of a * b + c on the host: the CPU backends promise the
# reference's bytes. Kernels keep nvcc's defaults (exact division and square root, no flush to zero;
# fma, which GEMMs want). No -march: code for one instruction set says so in its source and is
# chosen at run time.
function(moxie_flags target)
  set(host -Wall -Wextra -ffp-contract=off)
  if(MOXIE_WERROR)
    list(APPEND host -Werror)
  endif()
  if(MOXIE_SANITIZE)
    # A finding of either ends the program: a test that only prints it would still pass.
    set(sanitize -fsanitize=address -fsanitize=undefined -fsanitize=float-cast-overflow
      -fno-sanitize-recover=all -fno-omit-frame-pointer)
    list(APPEND host ${sanitize})
    target_link_options(${target} PRIVATE ${sanitize})
  endif()
  list(JOIN host "," host_words)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${host};-Wconversion;-Wno-sign-conversion>"
    # -std in words: CMake 3.25 does not know that nvcc 13 has C++20 and refuses CUDA_STANDARD 20.
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-Xcompiler=${host_words}>")
  if(MOXIE_WERROR)
    # A launch without a stream would run on the wrong one.
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=cross-execution-space-call,default-stream-launch>")
  endif()
  # Linking is g++'s: CUDA code comes in through static libraries and brings cudart along.
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

# ---- targets -----------------------------------------------------------------------------------

# moxie_library(name [SHARED] SOURCES a.cc ... CUDA b.cu ... SM90 c.cu ... LIBS public ones ...)
#   SOURCES  compiled always
#   CUDA     compiled when MOXIE_CUDA is on, for every architecture of MOXIE_CUDA_ARCHS
#   SM90     compiled when MOXIE_CUDA is on, for sm_90a alone (wgmma, setmaxnreg)
# The library moxie_x is also Moxie::x, here and for users of find_package(Moxie).
function(moxie_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SHARED" "" "SOURCES;CUDA;SM90;LIBS")
  set(kind STATIC)
  if(arg_SHARED)
    set(kind SHARED)
  endif()
  add_library(${name} ${kind} ${arg_SOURCES})
  string(REPLACE "moxie_" "" short ${name})
  add_library(Moxie::${short} ALIAS ${name})
  set_target_properties(${name} PROPERTIES EXPORT_NAME ${short})
  target_include_directories(${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${name} PUBLIC ${arg_LIBS})
  moxie_flags(${name})
  if(arg_SHARED AND NOT MOXIE_SANITIZE)
    # A symbol nobody defines is found now, not when the library is loaded.
    target_link_options(${name} PRIVATE -Wl,-z,defs)
  endif()

  if(MOXIE_CUDA)
    target_sources(${name} PRIVATE ${arg_CUDA})
    if(arg_SM90)
      # CMake sets architectures per target, not per source, so these are a target of their own.
      add_library(${name}_sm90 OBJECT ${arg_SM90})
      set_target_properties(${name}_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
      target_link_libraries(${name}_sm90 PRIVATE ${arg_LIBS})
      target_include_directories(${name}_sm90 PRIVATE ${PROJECT_SOURCE_DIR})
      target_compile_definitions(${name}_sm90 PRIVATE MOXIE_CUDA=1)
      moxie_flags(${name}_sm90)
      target_sources(${name} PRIVATE $<TARGET_OBJECTS:${name}_sm90>)
    endif()
  endif()
endfunction()

# moxie_test(name SOURCES a_test.cc ... LIBS Moxie::core ...): a GoogleTest program that ctest and
# tools/test.py run.
function(moxie_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  find_package(GTest REQUIRED)
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gmock GTest::gtest GTest::gtest_main)
  moxie_flags(${name})
  add_test(NAME ${name} COMMAND ${name})
endfunction()

# ---- package -----------------------------------------------------------------------------------

# What `cmake --install` gives: libraries, headers under their own paths, MoxieConfig.cmake and
# built_with_torch, which the Python package compares with the torch that it is loaded into. A wheel
# has all of it inside the folder of the package.
function(moxie_install_package)
  set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Moxie)
  install(TARGETS moxie_core EXPORT MoxieTargets)
  install(EXPORT MoxieTargets NAMESPACE Moxie:: DESTINATION ${config_dir})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/moxie/core DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moxie
    FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh")
  if(MOXIE_TORCH)
    install(TARGETS moxie_torch EXPORT MoxieTorchTargets)
    install(EXPORT MoxieTorchTargets NAMESPACE Moxie:: DESTINATION ${config_dir})
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/moxie/torch
      DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moxie FILES_MATCHING PATTERN "*.h")
    install(FILES ${PROJECT_SOURCE_DIR}/cmake/find_torch.cmake DESTINATION ${config_dir})
    file(WRITE ${PROJECT_BINARY_DIR}/built_with_torch "${MOXIE_TORCH_VERSION}\n")
    install(FILES ${PROJECT_BINARY_DIR}/built_with_torch DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/MoxieConfig.cmake.in
    ${PROJECT_BINARY_DIR}/MoxieConfig.cmake INSTALL_DESTINATION ${config_dir})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/MoxieConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
  foreach(file MoxieConfig.cmake MoxieConfigVersion.cmake)
    install(FILES ${PROJECT_BINARY_DIR}/${file} DESTINATION ${config_dir})
  endforeach()
endfunction()
