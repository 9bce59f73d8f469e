#!/usr/bin/env bash
# Tests the Python package on this machine's GPU, and times models of transformers there, patched beside unpatched.
#
#   scripts/test_python_cuda.sh [--packages FOLDER] [--out FOLDER] WHEEL|BUILD_DIR
#
# WHEEL is weft_mixers_cuda-*.whl. BUILD_DIR holds libweft_c.so and the command `weft` of a build with the cuda backend. python3 has torch,
# transformers and numpy; tests of CuPy, JAX and flash-linear-attention (FLA) are skipped where it lacks them. --packages names unpacked
# wheels that python3 lacks: pytest, flash-linear-attention, fla-core, einops. --out is where python-tests.log and transformers.json go.
# The last lines are a summary. The status is that of the tests, or 1 where the benchmark fails.
set -uo pipefail
cd "$(dirname "$0")/.."

packages= out=.
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --packages) packages=$(realpath "$2") ;;
    --out) out=$(realpath "$2") ;;
    *) echo "test_python_cuda.sh: $1 is no option" >&2; exit 2 ;;
  esac
  shift 2
done
[[ -e "${1:-}" ]] || { echo "test_python_cuda.sh: wanted a wheel or a build folder" >&2; exit 2; }
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
if [[ "$1" == *.whl ]]; then
  python3 -m pip install -q --no-index --no-deps --disable-pip-version-check --target "$package" "$1" 2>"$package/pip.log" ||
    { python3 -m zipfile -e "$1" "$package" && chmod +x "$package/weft/bin/weft"; } || exit 1 # python3 may lack pip
else
  cp -r python/weft "$package/"
  mkdir -p "$package/weft/bin"
  ln -sf "$(realpath "$1")/libweft_c.so" "$package/weft/libweft_c.so"
  ln -sf "$(realpath "$1")/weft" "$package/weft/bin/weft"
fi
export PYTHONPATH="$package${packages:+:$packages}"
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 COLUMNS=220

python3 -m weft devices || exit 1
started=$SECONDS
timeout 240 python3 -m pytest -q -ra -p no:cacheprovider --durations=8 python/tests/torch/test_cuda*.py \
  python/tests/torch/test_kv_cache.py 2>&1 | tee "$out/python-tests.log"
tested=$?
echo "tests: $((SECONDS - started)) s"
started=$SECONDS
timeout 240 python3 bench/python_transformers.py --device cuda --dtypes bf16 --repeat 5 --json "$out/transformers.json" \
  2>"$out/transformers.log" >"$package/table"
timed=$?
((timed)) && tail -n 20 "$out/transformers.log"
echo "benchmark: $((SECONDS - started)) s"

echo "== summary"
grep -E "^(FAILED|ERROR|SKIPPED)" "$out/python-tests.log" | cut -c 1-220
tail -n 1 "$out/python-tests.log"
cat "$package/table"
((tested == 0 && timed != 0)) && tested=1
exit "$tested"
