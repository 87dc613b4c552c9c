# A wheel of an exported program: one library that exports the C API, in the folder of the Python module.
find_package(Python REQUIRED COMPONENTS Interpreter)
if(HOSTWEAVE_TARGET STREQUAL "cpu" AND NOT HOSTWEAVE_OPENBLAS_ROOT)
  execute_process(COMMAND "${Python_EXECUTABLE}" -c "import scipy_openblas32 as o, pathlib; print(pathlib.Path(o.__file__).parent)"
                  OUTPUT_VARIABLE openblas_root OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(HOSTWEAVE_OPENBLAS_ROOT "${openblas_root}" CACHE PATH "" FORCE)
endif()

function(hostweave_wheel name)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/exported" "{ global: hw_*; ${name}_*; local: *; };\n")
  add_library(hostweave_wheel MODULE runtime/wheel/wheel.cpp)
  target_link_libraries(hostweave_wheel PRIVATE hostweave::${name})
  target_link_options(hostweave_wheel PRIVATE "-Wl,--version-script=${CMAKE_CURRENT_BINARY_DIR}/exported" -Wl,--no-undefined
                      "-Wl,--undefined=${name}_create")  # takes the program's C API from its archive
  # In site-packages, the module is next to scipy_openblas32. CUDA's libraries are loaded by PyTorch.
  set_target_properties(hostweave_wheel PROPERTIES ${hostweave_properties} PREFIX "" OUTPUT_NAME program
                        INSTALL_RPATH "$<$<STREQUAL:${HOSTWEAVE_TARGET},cpu>:$ORIGIN/../scipy_openblas32/lib>")
  install(TARGETS hostweave_wheel LIBRARY DESTINATION ${name})
endfunction()
