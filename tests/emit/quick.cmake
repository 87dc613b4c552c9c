# A toolchain for programs that run once: sources merged and not optimised.
# Without -Wsubobject-linkage: in a unity build g++ treats unnamed namespaces of included .cpp files like those of headers.
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 0)
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -Wno-subobject-linkage" CACHE STRING "")
set(CMAKE_CUDA_FLAGS_DEBUG "-O0 -Xcicc -O0 -Xptxas -O0" CACHE STRING "")
set(CMAKE_CXX_COMPILER_LAUNCHER python3 ${CMAKE_CURRENT_LIST_DIR}/kept_objects.py)
set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
