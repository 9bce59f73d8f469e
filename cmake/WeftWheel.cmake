# The binaries of a Python wheel, linked from the objects of this build and stripped: libweft_c.so and the command `weft`.
#
#   weft_wheel       without the cuda backend, in <build>/wheel/
#   weft_wheel_cuda  with it, in <build>/wheel_cuda/, where nvcc was found
#
# libstdc++, xxhash and utf8proc are inside. A stub comes before the archive that has the real thing, so the linker takes the stub.
set(weft_wheel_libraries hwy::hwy OpenMP::OpenMP_CXX ${CMAKE_DL_LIBS})
foreach(shared ${WEFT_UTF8PROC} ${WEFT_XXHASH})
  string(REGEX REPLACE "\\.so$" ".a" archive ${shared})
  if(EXISTS ${archive})
    list(APPEND weft_wheel_libraries ${archive})
  else()
    list(APPEND weft_wheel_libraries ${shared})
  endif()
endforeach()

function(weft_wheel_binary target ops folder)
  target_include_directories(${target} PRIVATE src include ${PROJECT_SOURCE_DIR})
  target_compile_features(${target} PRIVATE cxx_std_20)
  weft_library_defaults(${target})
  target_link_libraries(${target} PRIVATE $<TARGET_FILE:weft_model> $<TARGET_FILE:weft_files>
                        -Wl,--whole-archive $<TARGET_FILE:${ops}> -Wl,--no-whole-archive ${weft_wheel_libraries} ${ARGN})
  target_link_options(${target} PRIVATE -static-libstdc++ -Wl,--as-needed -Wl,--gc-sections -s)
  add_dependencies(${target} weft_model weft_files ${ops})
  set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder}
                        RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
endfunction()

function(weft_wheel name ops folder stubs case_stubs)
  add_library(${name}_c SHARED $<TARGET_OBJECTS:weft_c> ${stubs})
  weft_wheel_binary(${name}_c ${ops} ${folder} ${ARGN})
  target_link_options(${name}_c PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/weft_c.map -Wl,--no-undefined)
  add_executable(${name}_command $<TARGET_OBJECTS:weft_command> ${stubs} ${case_stubs} src/stubs/arc4random.cc)
  target_link_libraries(${name}_command PRIVATE $<TARGET_FILE:weft_cases> $<TARGET_FILE:weft_serve>)
  weft_wheel_binary(${name}_command ${ops} ${folder} fmt::fmt ${ARGN})
  add_dependencies(${name}_command weft_cases weft_serve)
  set_target_properties(${name}_c PROPERTIES OUTPUT_NAME weft_c NO_SONAME ON LINKER_LANGUAGE CXX)
  set_target_properties(${name}_command PROPERTIES OUTPUT_NAME weft LINKER_LANGUAGE CXX)
  add_custom_target(${name} DEPENDS ${name}_c ${name}_command)
endfunction()

if(weft_cuda_enabled)
  weft_wheel(weft_wheel weft_cpu wheel src/stubs/model_cuda.cc cases/stubs/cuda_device.cc)
  weft_wheel(weft_wheel_cuda weft wheel_cuda "" "" ${WEFT_CUDA_LIBRARIES})
else()
  weft_wheel(weft_wheel weft wheel "" "")
endif()
