# What `cmake --install` puts where: library, headers, command, find_package(weft), pkg-config and documents.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS weft EXPORT weftTargets)
install(DIRECTORY include/weft DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
if(WEFT_BUILD_TOOLS)
  install(TARGETS weft_command)
endif()
install(FILES README.md DESIGN.md LICENSE docs/json.md TYPE DOC)

set(weft_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
get_target_property(weft_type weft TYPE)
if(weft_type STREQUAL "STATIC_LIBRARY")
  # Whoever links the archive links what it needs.
  set(WEFT_NEEDS_DEPENDENCIES ON)
  set(WEFT_PC_LIBS "-lhwy ${OpenMP_CXX_FLAGS} -lstdc++ -lm")
else()
  set(WEFT_NEEDS_DEPENDENCIES OFF)
  set(WEFT_PC_LIBS)
endif()
configure_package_config_file(cmake/weftConfig.cmake.in weftConfig.cmake INSTALL_DESTINATION ${weft_package_dir})
write_basic_package_version_file(weftConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT weftTargets NAMESPACE weft:: DESTINATION ${weft_package_dir})
install(FILES ${PROJECT_BINARY_DIR}/weftConfig.cmake ${PROJECT_BINARY_DIR}/weftConfigVersion.cmake DESTINATION ${weft_package_dir})

# The prefix is found from the file's own place, so that an installed tree can be moved.
file(RELATIVE_PATH WEFT_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" WEFT_PC_PREFIX ${WEFT_PC_PREFIX})
configure_file(cmake/weft.pc.in weft.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/weft.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
