# Cross-compiles for aarch64 on a Debian machine and runs the result under qemu (packages: scripts/bootstrap.sh --with neon).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# qemu finds Debian's multiarch libraries by itself; with a library prefix (-L) OpenMP regions hang. The timeout ends a test that hangs
# all the same.
set(CMAKE_CROSSCOMPILING_EMULATOR timeout 1700 qemu-aarch64)
