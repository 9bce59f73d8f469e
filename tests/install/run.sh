#!/usr/bin/env bash
# Installs a build into a temporary prefix and builds the examples against it as a user would: find_package, then pkg-config.
#
#   tests/install/run.sh BUILD_DIR [CXX] [CC]
set -euo pipefail
build=$1
cxx=${2:-c++}
cc=${3:-cc}
source=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix="$work/prefix with space"

cmake --install "$build" --prefix "$prefix" >"$work/install.log"

echo "== find_package"
cmake -S "$source/examples" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_C_COMPILER="$cc" >"$work/configure.log" || { cat "$work/configure.log"; exit 1; }
cmake --build "$work/cmake" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
ctest --test-dir "$work/cmake" --output-on-failure --no-tests=error

echo "== pkg-config"
# An installed tree can be moved: pkg-config derives the prefix from the location of weft.pc.
mv "$prefix" "$work/moved"
PKG_CONFIG_PATH=$(dirname "$(find "$work/moved" -name weft.pc)")
export PKG_CONFIG_PATH
read -ra flags <<<"$(pkg-config --cflags weft)"
read -ra libs <<<"$(pkg-config --libs weft)"
for example in "$source"/examples/*.cc "$source"/examples/*.c; do
  program="$work/$(basename "$example")"
  case "$example" in
    *.cc) "$cxx" -std=c++20 "${flags[@]}" "$example" -o "$program.out" "${libs[@]}" ;;
    *.c) "$cc" -std=c11 "${flags[@]}" "$example" -o "$program.out" "${libs[@]}" ;;
  esac
  "$program.out"
done
read -ra flags <<<"$(pkg-config --cflags weft-model)"
read -ra libs <<<"$(pkg-config --libs weft-model)"
"$cxx" -std=c++20 "${flags[@]}" "$source/examples/model/stream_text.cc" -o "$work/stream_text.out" "${libs[@]}"
"$work/stream_text.out" "$work/moved/share/weft/models/weft-11m"
read -ra flags <<<"$(pkg-config --cflags weft-c)"
read -ra libs <<<"$(pkg-config --libs weft-c)"
"$cc" -std=c11 "${flags[@]}" "$source/examples/model/generate_text.c" -o "$work/generate_text.out" "${libs[@]}"
LD_LIBRARY_PATH=$(pkg-config --variable=libdir weft-c) "$work/generate_text.out" "$work/moved/share/weft/models/weft-11m"
[[ "$(pkg-config --modversion weft)" == "$("$work/moved/bin/weft" --version | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -n 1)" ]] ||
  { echo "weft.pc and the command disagree about the version"; exit 1; }
test -s "$work/moved/share/doc/weft/LICENSE"
