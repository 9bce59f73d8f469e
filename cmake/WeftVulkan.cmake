# Decides whether the vulkan backend is built: sets WEFT_VULKAN_SOURCES and WEFT_VULKAN_CASE_SOURCES, and weft_vulkan_enabled.
#
# AUTO builds it where Vulkan's headers are found; ON fails without them. OFF, and AUTO without them, build a stub that reports "not in this
# build". The library is not linked: the loader is opened at run time.
#
# Every shader src/vulkan/<family>/<stem>.comp is compiled to <build>/spirv/<name>.spv by glslangValidator and embedded. A line
# "// variants: E8 = -DE=8, E16 = -DE=16" makes one module for each variant, named <stem>.<variant>. Where there is no glslangValidator, the
# committed modules in src/vulkan/spirv take their place. `make spirv` refreshes those; the test vulkan_spirv compares the two.
set(WEFT_VULKAN AUTO CACHE STRING "Build the vulkan backend: ON, OFF or AUTO (when Vulkan's headers are found)")
set_property(CACHE WEFT_VULKAN PROPERTY STRINGS AUTO ON OFF)
if(NOT WEFT_VULKAN MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "WEFT_VULKAN is ${WEFT_VULKAN}, wanted AUTO, ON or OFF")
endif()
set(weft_vulkan_enabled OFF)
if(WEFT_VULKAN STREQUAL "AUTO" AND WEFT_SANITIZE)
  message(STATUS "Weft: no vulkan backend under a sanitizer, which would report what drivers leak (WEFT_VULKAN=ON insists)")
elseif(NOT WEFT_VULKAN STREQUAL "OFF")
  find_path(WEFT_VULKAN_HEADERS vulkan/vulkan_core.h HINTS ENV VULKAN_SDK PATH_SUFFIXES include)
  if(WEFT_VULKAN_HEADERS)
    set(weft_vulkan_enabled ON)
  elseif(WEFT_VULKAN STREQUAL "ON")
    message(FATAL_ERROR "WEFT_VULKAN is ON, but vulkan/vulkan_core.h was not found (Debian: libvulkan-dev)")
  endif()
endif()

# Appends a command that makes a module, and its file to weft_spirv.
function(weft_spirv_module shader name flags)
  set(module ${PROJECT_BINARY_DIR}/spirv/${name}.spv)
  if(WEFT_GLSLANG)
    add_custom_command(OUTPUT ${module}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/spirv
      COMMAND ${WEFT_GLSLANG} --quiet -g0 --target-env vulkan1.2 -I${PROJECT_SOURCE_DIR}/src ${flags} -o ${module} ${shader}
      DEPENDS ${shader} ${weft_shader_includes} COMMENT "Compiling shader ${name}" VERBATIM)
  else()
    set(committed ${PROJECT_SOURCE_DIR}/src/vulkan/spirv/${name}.spv)
    if(NOT EXISTS ${committed})
      message(FATAL_ERROR "there is neither glslangValidator (Debian: glslang-tools) nor ${committed}")
    endif()
    set(module ${committed})
  endif()
  set(weft_spirv ${weft_spirv} ${module} PARENT_SCOPE)
endfunction()

# Writes the source of all_shaders() (src/vulkan/common/shaders.h) from the modules.
function(weft_embed_spirv source)
  set(text "// Generated: the modules of all shaders.\n#include \"vulkan/common/shaders.h\"\n\n")
  set(externs "")
  set(table "")
  set(index 0)
  foreach(file ${ARGN})
    get_filename_component(name ${file} NAME_WLE)
    set(symbol weft_spirv_${index})
    string(APPEND text
      "asm(\".pushsection .rodata\\n.balign 16\\n.globl ${symbol}\\n.hidden ${symbol}\\n${symbol}:\\n.incbin \\\"${file}\\\"\\n"
      ".globl ${symbol}_end\\n.hidden ${symbol}_end\\n${symbol}_end:\\n.byte 0\\n.popsection\\n\");\n")
    string(APPEND externs "extern const unsigned char ${symbol}[], ${symbol}_end[];\n")
    string(APPEND table "      {\"${name}\", ${symbol}, ${symbol}_end},\n")
    math(EXPR index "${index} + 1")
  endforeach()
  string(APPEND text "extern \"C\" {\n${externs}}\n\nnamespace weft::vulkan {\nstd::span<const ShaderCode> all_shaders() {\n"
    "  static const ShaderCode shaders[] = {\n${table}  };\n  return shaders;\n}\n}  // namespace weft::vulkan\n")
  file(GENERATE OUTPUT ${source} CONTENT "${text}")
  set_source_files_properties(${source} PROPERTIES GENERATED TRUE OBJECT_DEPENDS "${ARGN}")
endfunction()

if(weft_vulkan_enabled)
  find_program(WEFT_GLSLANG glslangValidator HINTS ENV VULKAN_SDK PATH_SUFFIXES bin)
  file(GLOB_RECURSE WEFT_VULKAN_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/vulkan/*.cc)
  file(GLOB_RECURSE weft_shaders CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/vulkan/*.comp)
  file(GLOB_RECURSE weft_shader_includes CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/vulkan/*.glsl)
  set(weft_spirv "")
  foreach(shader ${weft_shaders})
    get_filename_component(stem ${shader} NAME_WE)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${shader})  # its line of variants
    file(STRINGS ${shader} variants REGEX "^// variants: ")
    if(NOT variants)
      weft_spirv_module(${shader} ${stem} "")
      continue()
    endif()
    string(REPLACE "// variants: " "" variants "${variants}")
    string(REPLACE "," ";" variants "${variants}")
    foreach(variant ${variants})
      string(REGEX MATCH "^ *([A-Za-z0-9_]+) = (.*)$" matched "${variant}")
      set(name ${CMAKE_MATCH_1})
      separate_arguments(flags UNIX_COMMAND "${CMAKE_MATCH_2}")
      weft_spirv_module(${shader} ${stem}.${name} "${flags}")
    endforeach()
  endforeach()
  file(GLOB stale ${PROJECT_BINARY_DIR}/spirv/*.spv)  # modules of shaders that are gone
  list(REMOVE_ITEM stale "" ${weft_spirv})
  if(stale)
    file(REMOVE ${stale})
  endif()
  weft_embed_spirv(${PROJECT_BINARY_DIR}/vulkan_shaders.cc ${weft_spirv})
  list(APPEND WEFT_VULKAN_SOURCES ${PROJECT_BINARY_DIR}/vulkan_shaders.cc)
  file(GLOB WEFT_VULKAN_CASE_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cases/vulkan/*.cc)
  if(NOT WEFT_GLSLANG)
    message(STATUS "Weft: no glslangValidator, so the committed SPIR-V is used")
  endif()
else()
  set(WEFT_VULKAN_SOURCES ${PROJECT_SOURCE_DIR}/src/stubs/vulkan.cc)
  set(WEFT_VULKAN_CASE_SOURCES ${PROJECT_SOURCE_DIR}/cases/stubs/vulkan_device.cc)
endif()
message(STATUS "Weft: vulkan backend ${weft_vulkan_enabled}")
