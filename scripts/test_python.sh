#!/usr/bin/env bash
# Tests the Python package as a user has it: builds the wheel, installs it into a clean environment, and runs python/tests.
#
#   scripts/test_python.sh [BUILD_DIR]           numpy alone, then again with ml_dtypes for bf16
#   scripts/test_python.sh --torch [BUILD_DIR]   python/tests/torch, with torch, transformers and fla-core from PyPI; builds the CUDA wheel too
#
# BUILD_DIR is build/ unless named.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=passive # waiting threads sleep: the machine has other work

torch=0
wheels=--cpu
[[ "${1:-}" == --torch ]] && { torch=1; wheels=; shift; }
build=${1:-build}
scripts/wheel.sh $wheels "$build" >"$build/wheel.log" 2>&1 || { tail -n 40 "$build/wheel.log"; exit 1; }
wheel=$(ls dist/weft_mixers-[0-9]*-py3-none-manylinux_*.whl)

clean_environment() { # folder, packages
  local folder=$1
  shift
  python3 -m venv --clear "$folder"
  "$folder/bin/pip" install -q --disable-pip-version-check "$wheel" "$@"
}

if ((torch)); then
  environment=.venv-torch
  [[ -x "$environment/bin/python" ]] || clean_environment "$environment" torch transformers fla-core pytest
  "$environment/bin/pip" install -q --disable-pip-version-check --force-reinstall --no-deps "$wheel"
  exec "$environment/bin/python" -m pytest -q -ra python/tests/torch
fi

# The oldest Python whose syntax and standard library the package may use.
"$PWD/.venv-wheel/bin/vermin" --quiet --no-tips -t=3.9- --violations python
environment=$build/venv-python
clean_environment "$environment"
"$environment/bin/python" -m unittest discover -s python/tests
"$environment/bin/pip" install -q --disable-pip-version-check ml_dtypes
cd python/tests
"../../$environment/bin/python" -m unittest test_arrays.Sixteen
