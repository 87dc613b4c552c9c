# Keeps what CMake found out about compilers, for the next project that quick.cmake configures.
set(kept "$ENV{CXX}-${CMAKE_VERSION}")
file(MAKE_DIRECTORY "${kept}")
file(GLOB found RELATIVE "${CMAKE_PLATFORM_INFO_DIR}" "${CMAKE_PLATFORM_INFO_DIR}/CMake*Compiler.cmake")
string(RANDOM LENGTH 12 part)
foreach(name IN LISTS found)
  if(NOT EXISTS "${kept}/${name}")
    file(COPY_FILE "${CMAKE_PLATFORM_INFO_DIR}/${name}" "${kept}/${part}")
    file(RENAME "${kept}/${part}" "${kept}/${name}")  # in one step, because other workers may read the file
  endif()
endforeach()
