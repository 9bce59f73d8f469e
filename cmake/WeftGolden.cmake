# Embeds files into a program: weft_embed_golden(<target> <files...>) gives cases/golden.h its golden_files().
function(weft_embed_golden target)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/golden_data.cc)
  set(text "// Generated: the golden files, byte for byte.\n#include \"cases/golden.h\"\n\n")
  set(externs "")
  set(table "")
  set(index 0)
  foreach(file ${ARGN})
    get_filename_component(name ${file} NAME_WE)
    set(symbol weft_golden_${index})
    string(APPEND text
      "asm(\".pushsection .rodata\\n.balign 16\\n.globl ${symbol}\\n${symbol}:\\n.incbin \\\"${file}\\\"\\n"
      ".globl ${symbol}_end\\n${symbol}_end:\\n.byte 0\\n.popsection\\n\");\n")
    string(APPEND externs "extern const uint8_t ${symbol}[], ${symbol}_end[];\n")
    string(APPEND table "      {\"${name}\", {${symbol}, ${symbol}_end}},\n")
    math(EXPR index "${index} + 1")
  endforeach()
  string(APPEND text "extern \"C\" {\n${externs}}\n\nnamespace weft::cases {\nstd::span<const GoldenFile> golden_files() {\n"
    "  static const GoldenFile files[] = {\n${table}  };\n  return files;\n}\n}  // namespace weft::cases\n")
  file(GENERATE OUTPUT ${source} CONTENT "${text}")
  set_source_files_properties(${source} PROPERTIES GENERATED TRUE OBJECT_DEPENDS "${ARGN}")
  target_sources(${target} PRIVATE ${source})
endfunction()
