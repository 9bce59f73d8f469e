#!/usr/bin/env bash
# Installs a build into a temporary prefix and builds the installed examples against it as a user would: find_package, then pkg-config.
# Each with the shared library, with the archives, and with the archive that needs no CUDA toolkit.
#
#   tests/install/run.sh BUILD_DIR [CXX] [CC]
set -euo pipefail
build=$1
cxx=${2:-c++}
cc=${3:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix="$work/prefix with space"

cmake --install "$build" --prefix "$prefix" >"$work/install.log"
has_shared=0
[[ -n "$(find "$prefix" -name libweft.so)" ]] && has_shared=1

# The toolkits and libraries that the package must not look for are disabled: a find_package(... REQUIRED) of one would fail.
with_cmake() { # what the examples link, packages that must not be needed, then targets (default: all)
  local link=$1 without=() name
  for name in $2; do without+=("-DCMAKE_DISABLE_FIND_PACKAGE_$name=ON"); done
  echo "== find_package, $link"
  cmake -S "$prefix/share/weft/examples" -B "$work/$link" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release -DWEFT_EXAMPLES_LINK="$link" \
    "${without[@]}" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_C_COMPILER="$cc" >"$work/configure.log" 2>&1 || { cat "$work/configure.log"; exit 1; }
  cmake --build "$work/$link" ${3:+--target "$3"} >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
  ctest --test-dir "$work/$link" --output-on-failure --no-tests=error ${3:+-R "^example_$3\$"}
}
if ((has_shared)); then
  with_cmake shared "hwy OpenMP CUDAToolkit"
else
  with_cmake shared ""
fi
with_cmake static ""
with_cmake static_cpu CUDAToolkit attention_cache

# An installed tree can be moved: pkg-config derives the prefix from the location of weft.pc.
mv "$prefix" "$work/moved"
PKG_CONFIG_PATH=$(dirname "$(find "$work/moved" -name weft.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir weft)
examples="$work/moved/share/weft/examples"
model="$work/moved/share/weft/models/weft-11m"
with_pkg_config() { # module, example, then arguments of the program
  local module=$1 example=$2 program flags libs
  shift 2
  echo "== pkg-config $module, $example"
  program="$work/$module.$(basename "$example").out"
  read -ra flags <<<"$(pkg-config --cflags "$module")"
  read -ra libs <<<"$(pkg-config --libs "$module")"
  case "$example" in
    *.cc) "$cxx" -std=c++20 "${flags[@]}" "$examples/$example" -o "$program" "${libs[@]}" ;;
    *.c) "$cc" -std=c11 "${flags[@]}" "$examples/$example" -o "$program" "${libs[@]}" -lm ;;
  esac
  LD_LIBRARY_PATH=$libdir "$program" "$@"
  if [[ "$module" == *-static* ]] && readelf -d "$program" | grep -q 'NEEDED.*libweft'; then
    echo "pkg-config $module linked the shared library" >&2
    exit 1
  fi
}
for example in decode_step.cc attention_cache.cc c_api.c; do with_pkg_config weft "$example"; done
with_pkg_config weft-static decode_step.cc
with_pkg_config weft-static-cpu c_api.c
with_pkg_config weft-model model/stream_text.cc "$model"
with_pkg_config weft-model-static model/stream_text.cc "$model"
with_pkg_config weft-c model/generate_text.c "$model"
with_pkg_config weft-c c_api.c # libweft_c has the ops too
if ((has_shared)) && pkg-config --libs weft weft-model weft-c | grep -qiE 'cuda|hwy|gomp|openmp'; then
  echo "pkg-config names libraries that only the archives need: $(pkg-config --libs weft weft-model weft-c)" >&2
  exit 1
fi
if pkg-config --libs weft-static-cpu | grep -qi cuda; then
  echo "weft-static-cpu names the CUDA toolkit: $(pkg-config --libs weft-static-cpu)" >&2
  exit 1
fi
[[ "$(pkg-config --modversion weft)" == "$("$work/moved/bin/weft" --version | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -n 1)" ]] ||
  { echo "weft.pc and the command disagree about the version"; exit 1; }
test -s "$work/moved/share/doc/weft/LICENSE"
