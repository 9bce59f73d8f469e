#!/usr/bin/env bash
# Builds llama.cpp with backends as libraries, and Weft's backend for it, libggml-weft.so (docs/llama-cpp.md).
#
#   scripts/llama.sh            llama-completion, llama-bench and llama-quantize in build-llama/bin, and build-llama/libggml-weft.so
#   scripts/llama.sh --tests    also what tests/llama/run.py and bench/llama.py need
#   scripts/llama.sh --server   also llama-server and the packages that bench/serve_llama.py needs
#
# The source is the one that the package llama-cpp-python carries on PyPI. ccache is used where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
package=llama-cpp-python version=0.3.36 # its llama.cpp has ggml 0.25.3, which plugins/ggml/CMakeLists.txt knows
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
archive=.cache/llama/llama_cpp_python-$version.tar.gz
root=build-llama
python=.venv-llama/bin/python
jobs=${JOBS:-$(nproc)}
tests=0 server=0
case "${1:-}" in
  '') ;;
  --tests) tests=1 ;;
  --server) server=1 ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

# Prints the log of a command only where it fails.
quietly() { # name of the log, command
  local log="$root/$1.log"
  shift
  "$@" >"$log" 2>&1 && return
  grep -E -A 12 'error|Error|FAILED' "$log" | head -n 60 >&2 || tail -n 30 "$log" >&2
  echo "llama: '$*' failed; its log is $log" >&2
  return 1
}

mkdir -p "$root" "$(dirname "$archive")"
[[ -x $python ]] || python3 -m venv .venv-llama
if [[ ! -f $archive ]]; then
  echo "llama: downloading $package $version (77 MB)"
  quietly download .venv-llama/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary $package -d "$(dirname "$archive")" \
    "$package==$version"
fi
if [[ "$(cat $root/llama.cpp/.from 2>/dev/null)" != "$version" ]]; then
  echo "$sha256  $archive" | sha256sum --check --quiet || { echo "llama: $archive is not the file that this script knows" >&2; exit 1; }
  rm -rf $root/llama.cpp
  tar -xzf "$archive" -C $root --strip-components=2 "llama_cpp_python-$version/vendor/llama.cpp"
  echo $version >$root/llama.cpp/.from
fi

# ggml does not combine -march=native with backends as libraries, so the instruction sets of this machine are named one by one.
options=(-DGGML_NATIVE=OFF)
if [[ "$(uname -m)" == x86_64 ]]; then
  macros=$("${CC:-cc}" -march=native -dM -E -x c /dev/null)
  for entry in SSE42:SSE4_2 AVX:AVX AVX2:AVX2 FMA:FMA F16C:F16C BMI2:BMI2 AVX_VNNI:AVXVNNI AVX512:AVX512F AVX512_VBMI:AVX512VBMI \
    AVX512_VNNI:AVX512VNNI AVX512_BF16:AVX512BF16; do
    grep -q "define __${entry#*:}__ " <<<"$macros" && options+=("-DGGML_${entry%:*}=ON") || options+=("-DGGML_${entry%:*}=OFF")
  done
fi
targets=(ggml-cpu llama llama-completion llama-bench llama-quantize)
((tests)) && targets+=(test-backend-ops)
((server)) && targets+=(llama-server) && options+=(-DLLAMA_BUILD_SERVER=ON -DLLAMA_USE_PREBUILT_UI=OFF) || options+=(-DLLAMA_BUILD_SERVER=OFF)

echo "llama: building llama.cpp (10 minutes on 2 cores when nothing is cached)"
quietly configure cmake -S $root/llama.cpp -B $root/llama -G Ninja -Wno-dev -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF "${options[@]}"
quietly build cmake --build $root/llama -j "$jobs" --target "${targets[@]}"
ln -sfn llama/bin $root/bin

echo "llama: building libggml-weft.so"
launcher=()
command -v ccache >/dev/null && [[ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ]] && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
quietly configure-weft cmake -S . -B $root/weft -G Ninja -Wno-dev -DCMAKE_BUILD_TYPE=Release -DWEFT_CUDA=OFF -DWEFT_BUILD_TOOLS=OFF \
  -DWEFT_BUILD_TESTS=OFF -DWEFT_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF -DWEFT_GGML="$PWD/$root/llama.cpp" "${launcher[@]}"
quietly build-weft cmake --build $root/weft -j "$jobs" --target ggml-weft ggml-weft-op-tests
ln -sfn weft/libggml-weft.so $root/libggml-weft.so

if ((tests || server)); then
  .venv-llama/bin/pip install --quiet --disable-pip-version-check gguf numpy
fi
if ((tests)); then
  flags=(-std=c++20 -O1 -Wall -Wextra -I "$root/llama.cpp/include" -I "$root/llama.cpp/ggml/include" -I include -L "$root/bin"
    "-Wl,-rpath,$PWD/$root/bin")
  libraries=(-lllama -lggml -lggml-base)
  "${CXX:-c++}" "${flags[@]}" tests/llama/drive.cc -o $root/drive "${libraries[@]}"
  "${CXX:-c++}" "${flags[@]}" tests/llama/backend.cc -o $root/backend "${libraries[@]}"
  "${CXX:-c++}" "${flags[@]}" -fopenmp bench/llama/attention.cc -o $root/attention $root/weft/libweft.a "${libraries[@]}" -lhwy
  "${CC:-cc}" -shared -fPIC tests/llama/other_version.c -o $root/other_version.so
fi
echo "Run a hybrid model with Weft:"
echo "  GGML_WEFT_STATS=1 GGML_BACKEND_PATH=$root/libggml-weft.so $root/bin/llama-completion -m MODEL.gguf -p 'The ship' -n 64"
