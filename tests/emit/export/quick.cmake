# A toolchain for programs that run only once: sources are merged and not optimised.
# -Wsubobject-linkage is off, because g++ treats unnamed namespaces of .cpp files in a unity build like those of headers.
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 0)
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -Wno-subobject-linkage" CACHE STRING "")
set(CMAKE_CUDA_FLAGS_DEBUG "-O0 -Xcicc -O0 -Xptxas -O0" CACHE STRING "")
set(CMAKE_CXX_COMPILER_LAUNCHER python3 ${CMAKE_CURRENT_LIST_DIR}/kept_objects.py)
set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})

# CMake examines each compiler only once, because examining it in each project would take seconds.
get_property(is_trial GLOBAL PROPERTY IN_TRY_COMPILE)
if(NOT is_trial)
  file(GLOB examined "$ENV{CXX}-${CMAKE_VERSION}/CMake*Compiler.cmake")
  file(COPY ${examined} DESTINATION "${CMAKE_PLATFORM_INFO_DIR}")
  set(CMAKE_EXECUTABLE_FORMAT ELF CACHE INTERNAL "")  # found together with the compilers
  set(keep_compilers "${CMAKE_CURRENT_LIST_DIR}/kept_compilers.cmake")
  cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL include "${keep_compilers}")
endif()
