# The target of exported programs, and functions for their CMakeLists.txt. A program includes this file after `project`.
set(HOSTWEAVE_TARGET cpu CACHE STRING "cpu or cuda")
set_property(CACHE HOSTWEAVE_TARGET PROPERTY STRINGS cpu cuda)
if(NOT HOSTWEAVE_TARGET MATCHES "^(cpu|cuda)$")
  message(FATAL_ERROR "HOSTWEAVE_TARGET is ${HOSTWEAVE_TARGET}: write cpu or cuda")
endif()
option(HOSTWEAVE_INSTALL "Install exported programs, for find_package(hostweave COMPONENTS ...)" ${PROJECT_IS_TOP_LEVEL})

if(HOSTWEAVE_TARGET STREQUAL "cuda")
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER OR needs_nvcc)
    enable_language(CUDA)
  endif()
endif()

# nvcc links no CUDA runtime, because hostweave_runtime::dependencies has the shared library.
set(hostweave_properties CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON CUDA_STANDARD 20 CUDA_RUNTIME_LIBRARY None)

# Adds a library of the runtime, hostweave_runtime::NAME, with these sources.
function(hostweave_runtime_part name)
  add_library(hostweave_${name} STATIC ${ARGN})
  target_compile_options(hostweave_${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${hostweave_cuda_flags}>")
  hostweave_library(hostweave_${name} hostweave_runtime ${name} runtime)
endfunction()

# Gives a library the public name NAMESPACE::NAME, in the same build and by find_package.
function(hostweave_library target namespace name folder)
  add_library(${namespace}::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES ${hostweave_properties} EXPORT_NAME ${name})
  if(HOSTWEAVE_INSTALL)
    include(GNUInstallDirs)
    install(TARGETS ${target} EXPORT ${target} ARCHIVE INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/hostweave")
    install(EXPORT ${target} FILE ${name}.cmake NAMESPACE ${namespace}:: DESTINATION "${CMAKE_INSTALL_LIBDIR}/cmake/hostweave/${folder}")
  endif()
endfunction()

# Quotients of kernels are within 2 units in the last place.
set(hostweave_cuda_flags --prec-div=false)

# Compiles the kernels of a program: by nvcc, or as C++ for the CPU.
function(hostweave_kernels)
  if(HOSTWEAVE_TARGET STREQUAL "cpu")
    set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++;-fwrapv")
  else()
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "${hostweave_cuda_flags}")
  endif()
endfunction()

