# The server of `weft serve`, as an archive that the command links: HTTP by Boost.Beast and Asio, which are headers only. Its page is embedded
# byte for byte.
find_package(Boost 1.74 REQUIRED)
find_package(Threads REQUIRED)
file(GLOB WEFT_SERVE_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/serve/*.cc)
set(weft_page ${PROJECT_SOURCE_DIR}/src/serve/page.html)
set(weft_page_source ${PROJECT_BINARY_DIR}/generated/serve/page_data.cc)
file(GENERATE OUTPUT ${weft_page_source} CONTENT
"// Generated: the page of the server.
#include \"serve/page.h\"

asm(\".pushsection .rodata\\n.globl weft_serve_page\\nweft_serve_page:\\n.incbin \\\"${weft_page}\\\"\\n\"
    \".globl weft_serve_page_end\\nweft_serve_page_end:\\n.byte 0\\n.popsection\\n\");
extern \"C\" {
extern const char weft_serve_page[], weft_serve_page_end[];
}

namespace weft::serve {
std::string_view page_html() { return {weft_serve_page, weft_serve_page_end}; }
}  // namespace weft::serve
")
set_source_files_properties(${weft_page_source} PROPERTIES GENERATED TRUE OBJECT_DEPENDS ${weft_page})
add_library(weft_serve STATIC ${WEFT_SERVE_SOURCES} ${weft_page_source})
target_compile_definitions(weft_serve PRIVATE BOOST_ASIO_SEPARATE_COMPILATION BOOST_BEAST_SEPARATE_COMPILATION)
target_link_libraries(weft_serve PUBLIC weft_model PRIVATE weft_flags Boost::headers Threads::Threads)
weft_library_defaults(weft_serve)

# The client of `make load`.
if(WEFT_BUILD_TOOLS)
  find_package(fmt REQUIRED)
  find_package(CLI11 REQUIRED)
  add_executable(weft_load EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/bench/load.cc)
  target_link_libraries(weft_load PRIVATE nlohmann_json::nlohmann_json weft_flags CLI11::CLI11 fmt::fmt)
  set_target_properties(weft_load PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
endif()
