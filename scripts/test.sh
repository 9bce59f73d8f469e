#!/usr/bin/env bash
# Runs steps of the test suite and ends with "N passed, N failed, N skipped" over all of them.
#
#   scripts/test.sh fast | all | STEP...     steps: release python serve asan fuzz neon tidy full-asan tsan args long-fuzz full-neon full-tidy full-check
#                                            vulkan docs page load llama torch
#
# A step is a build and its tests, or one check. A failing step does not stop the others; the exit status is 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/.."

fast_steps=(release python serve asan fuzz neon tidy)
# Every other fast step is part of a slow one: asan of full-asan, fuzz of long-fuzz, neon of full-neon, tidy of full-tidy.
all_steps=(release python serve full-asan tsan args long-fuzz full-neon full-tidy full-check vulkan docs page load llama)
jobs=$(nproc)
passed=0
failed=0
skipped=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Runs ctest with the given arguments and adds its counts. ctest counts a skipped test as passed and marks its line "***Skipped".
# A run that found no test or did not finish counts as one failure.
count_ctest() {
  local log="$logs/ctest"
  ctest -j "$jobs" --output-on-failure --no-tests=error "$@" 2>&1 | tee "$log"
  local status=${PIPESTATUS[0]}
  local summary unrun
  unrun=$(grep -c '\*\*\*Skipped' "$log")
  summary=$(sed -n 's/.*tests passed, \([0-9]*\) tests failed out of \([0-9]*\).*/\1 \2/p' "$log" | tail -n 1)
  if [[ -z "$summary" ]]; then
    failed=$((failed + 1))
    return 1
  fi
  failed=$((failed + ${summary% *}))
  skipped=$((skipped + unrun))
  passed=$((passed + ${summary#* } - ${summary% *} - unrun))
  count_skips "$(sed -n 's/^Test project //p' "$log" | tail -n 1)"
  return "$status"
}

# Names the single tests that a passing test program skipped, with their reasons. ctest does not show them.
count_skips() { # build folder
  local all="$1/Testing/Temporary/LastTest.log" skips="$logs/skips"
  [[ -r "$all" ]] || return 0
  awk '/: Skipped$/ { getline reason } /^\[  SKIPPED \] .* \([0-9]+ ms\)$/ { print "skipped: " $4 ": " reason }' "$all" >"$skips"
  cat "$skips"
  skipped=$((skipped + $(wc -l <"$skips")))
}

# A check that counts as one test.
count_one() {
  if "$@"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    return 1
  fi
}

# Runs a command once for every word of a list, in place of {}: as many at once as there are cores, since each keeps about one core
# busy. Each counts as one test.
count_each() { # a command that prints the list, then the command
  local word wrong=0 list words
  list=$("$1") && [[ -n "$list" ]] || {
    failed=$((failed + 1))
    return 1
  }
  shift
  mapfile -t words <<<"$list"
  rm -rf "$logs/each" && mkdir "$logs/each"
  printf '%s\n' "${words[@]}" |
    OMP_WAIT_POLICY=passive xargs -P "$jobs" -I{} sh -c '"$@" >"$0/{}" 2>&1 && touch "$0/{}.passed"' "$logs/each" "$@"
  for word in "${words[@]}"; do
    if [[ -e "$logs/each/$word.passed" ]]; then
      echo "$word: $(tail -n 1 "$logs/each/$word")"
      passed=$((passed + 1))
    else
      cat "$logs/each/$word"
      echo "$word: FAILED"
      failed=$((failed + 1))
      wrong=1
    fi
  done
  return "$wrong"
}

op_names() {
  build/weft ops --schema | python3 -c 'import json, sys
for op in json.load(sys.stdin)["ops"]: print(op["op"])'
}

args_test=build-full-asan/tests/random_args_test
args_names() {
  local listed
  listed=$($args_test --gtest_list_tests) && sed -n 's/^  //p' <<<"$listed"
}

# The sum of the numbers that a pattern finds in a file.
sum_in() {
  grep -E "$2" "$1" | grep -oE "$3" | grep -oE '[0-9]+' | awk '{ sum += $1 } END { print sum + 0 }'
}

# Runs Python tests and adds what their runner counts. unittest: "Ran 51 tests in 20.1s", "FAILED (failures=1, errors=2, skipped=3)".
# pytest: "1 failed, 50 passed, 3 skipped, 2 errors in 20.13s".
count_python() {
  local log="$logs/python" ran=0 wrong=0 unrun=0
  "$@" 2>&1 | tee "$log"
  local status=${PIPESTATUS[0]} of_pytest='^=*.*[0-9]+ (passed|failed|errors?|skipped).* in [0-9.]+s'
  wrong=$(($(sum_in "$log" '^FAILED \(' '(failures|errors)=[0-9]+') + $(sum_in "$log" "$of_pytest" '[0-9]+ (failed|error)')))
  unrun=$(($(sum_in "$log" '^(OK|FAILED) \(' 'skipped=[0-9]+') + $(sum_in "$log" "$of_pytest" '[0-9]+ skipped')))
  ran=$(($(sum_in "$log" '^Ran [0-9]+ test' 'Ran [0-9]+') + $(sum_in "$log" "$of_pytest" '[0-9]+ (passed|failed|error|skipped)')))
  ((status != 0 && wrong == 0)) && wrong=1 # the build, the installation or the syntax check
  failed=$((failed + wrong))
  skipped=$((skipped + unrun))
  ((ran > wrong + unrun)) && passed=$((passed + ran - wrong - unrun))
  return "$status"
}

# Configures and builds a preset, or only the targets given. Prints only errors; a failed build counts as one failed test.
count_built() {
  local preset=$1 log="$logs/build-$1"
  shift
  { cmake --preset "$preset" -Wno-dev && cmake --build --preset "$preset" ${1:+--target "$@"}; } >"$log" 2>&1 && return 0
  grep -E -A 12 'error|FAILED' "$log" | head -n 80
  echo "building preset $preset failed"
  failed=$((failed + 1))
  return 1
}

preset_step() { # preset, then arguments of ctest
  count_built "$1" && count_ctest --preset "$@"
}

fuzz_step() { # seconds per target
  local log="$logs/build-fuzz"
  if ! { cmake -S fuzz -B build-fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++-14 -DWEFT_FUZZ_SECONDS="$1" && cmake --build build-fuzz; } \
    >"$log" 2>&1; then
    tail -n 60 "$log"
    failed=$((failed + 1))
    return 1
  fi
  count_ctest --test-dir build-fuzz
}

llama_step() {
  if ! scripts/llama.sh --tests; then
    failed=$((failed + 1))
    return 1
  fi
  count_python .venv-llama/bin/python tests/llama/run.py
}

# The whole fast tier on Vulkan devices, software too, where there is one.
vulkan_step() {
  count_built release weft_command || return 1
  if ! build/weft devices --json | python3 -c 'import json, sys
sys.exit(not any(d["backend"] == "vulkan" and d["usable"] for d in json.load(sys.stdin)["devices"]))'; then
    echo "vulkan: no usable device"
    skipped=$((skipped + 1))
    return 0
  fi
  count_one build/weft check --backend vulkan --tier fast
}

step() {
  case "$1" in
    release) preset_step release ;;
    asan) count_built asan weft_op_tests && count_ctest --preset asan -LE once -E '^(cli|model|chat|serve|cuda|vulkan)_' ;;
    full-asan) preset_step full-asan -LE once ;;
    fuzz) fuzz_step 5 ;;
    neon) count_built neon weft_cpu_tests && count_ctest --preset neon -R ^cpu_ ;;
    python) count_built release weft_command && count_python scripts/test_python.sh ;;
    serve) count_built release weft_command && count_python scripts/test_serve.sh ;;
    page) count_built release weft_command && count_python scripts/test_serve.sh --page ;;
    load) count_built release weft_command weft_load && count_one scripts/load.sh --check ;;
    torch) count_built release weft_command && count_python scripts/test_python.sh --torch ;;
    tidy) count_one scripts/tidy.sh ;;
    tsan) preset_step tsan -LE once ;;
    args) count_built full-asan random_args_test && count_each args_names $args_test --mutants=20000 --seed=2 '--gtest_filter=*.{}' ;;
    long-fuzz) fuzz_step 180 && count_built release weft_command && count_each op_names build/weft check --backend cpu --random 400 --seed 2 --op {} ;;
    full-neon) preset_step neon -LE once ;;
    full-tidy) count_one scripts/tidy.sh --all ;;
    full-check) count_built release && count_each op_names build/weft check --tier full --op {} ;;
    vulkan) vulkan_step ;;
    docs) count_one scripts/docs.sh ;;
    llama) llama_step ;;
    *) echo "test.sh: unknown step '$1'" >&2; exit 2 ;;
  esac
}

steps=()
for name in "$@"; do
  case "$name" in
    fast) steps+=("${fast_steps[@]}") ;;
    all) steps+=("${all_steps[@]}") ;;
    *) steps+=("$name") ;;
  esac
done
((${#steps[@]})) || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }

summary=()
for name in "${steps[@]}"; do
  echo "== $name"
  started=$SECONDS
  outcome=passed
  step "$name" || outcome=FAILED
  summary+=("$(printf '%-12s %-7s %4d s' "$name" "$outcome" $((SECONDS - started)))")
done
echo
printf '%s\n' "${summary[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
