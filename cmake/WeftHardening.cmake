# Flags against exploitation of memory errors: weft_harden(<target>...) for what is installed.
#
# Sanitizers bring checks of their own and replace some of the functions that _FORTIFY_SOURCE checks, so builds with them go without.
# Functions that handle no arrays on the stack get no canary, so kernels pay for nothing that they do not use (docs/lab/hardening.md).
option(WEFT_HARDENING "Compile and link with stack protector, _FORTIFY_SOURCE, full RELRO and control-flow protection" ON)

set(weft_hardening_flags)
set(weft_hardening_host_flags)  # the same for nvcc, which passes them to the compiler of the host code
if(WEFT_HARDENING AND NOT WEFT_SANITIZE)
  include(CheckCXXCompilerFlag)
  include(CheckPIESupported)
  check_pie_supported(LANGUAGES C CXX)
  # -mbranch-protection is Arm's counterpart of x86's -fcf-protection.
  foreach(flag -fstack-protector-strong -fstack-clash-protection -fcf-protection=full -mbranch-protection=standard)
    string(MAKE_C_IDENTIFIER "WEFT_HAS${flag}" known)
    check_cxx_compiler_flag(${flag} ${known})
    if(${known})
      list(APPEND weft_hardening_flags ${flag})
      list(APPEND weft_hardening_host_flags -Xcompiler=${flag})
    endif()
  endforeach()
  # Level 3 needs GCC 12 or clang 9, and glibc 2.34; older ones take it for level 2. Without optimisation it does nothing but warn.
  set(optimised "CONFIG:Release,RelWithDebInfo,MinSizeRel")
  list(APPEND weft_hardening_flags "$<$<${optimised}>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=3>")
  list(APPEND weft_hardening_host_flags "$<$<${optimised}>:-Xcompiler=-U_FORTIFY_SOURCE,-D_FORTIFY_SOURCE=3>")
endif()

function(weft_harden)
  if(NOT weft_hardening_flags)
    return()
  endif()
  foreach(target ${ARGN})
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C,CXX>:${weft_hardening_flags}>")
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${weft_hardening_host_flags}>")
    get_target_property(type ${target} TYPE)
    if(type MATCHES "SHARED|MODULE|EXECUTABLE")
      target_link_options(${target} PRIVATE -Wl,-z,relro,-z,now,-z,noexecstack)
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    endif()
  endforeach()
endfunction()
