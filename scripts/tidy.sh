#!/usr/bin/env bash
# Lints the sources that changed: against the merge base with the default branch, or on that branch itself against the commit before.
#
#   scripts/tidy.sh            what changed, uncommitted and new files included
#   scripts/tidy.sh FILE...    these files
#   scripts/tidy.sh --all      every source, with the analyzer as well
#
# A changed header is linted through the sources of the same stem, or else through one that includes it. CUDA sources are not linted:
# clang-tidy 14 cannot read the headers of the toolkit.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build-tidy
tidy=$(command -v clang-tidy-14 || command -v clang-tidy) || { echo "tidy: clang-tidy is not installed (scripts/bootstrap.sh --with test)" >&2; exit 1; }
# Compile commands of every single source, and the one header that a build makes.
cmake --preset release -B $build -DWEFT_UNITY=OFF -Wno-dev --log-level=WARNING >/dev/null
cmake --build $build --target weft_build_info >/dev/null

changed() {
  local branch base
  branch=$(git symbolic-ref --quiet --short refs/remotes/origin/HEAD || true)
  for candidate in "$branch" origin/main main master; do
    [[ -n "$candidate" ]] && git rev-parse --verify --quiet "$candidate^{commit}" >/dev/null && break
  done
  base=$(git merge-base "$candidate" HEAD 2>/dev/null || git rev-parse HEAD)
  if [[ "$base" == "$(git rev-parse HEAD)" ]]; then
    # On the default branch: its last commit; a first or shallow commit holds everything.
    base=$(git rev-parse --verify --quiet 'HEAD~1^{commit}' || git hash-object -t tree /dev/null)
  fi
  { git diff --name-only --diff-filter=d "$base"; git ls-files --others --exclude-standard; } | sort -u
}

list() { git ls-files --cached --others --exclude-standard -- "$@"; }

# A source that includes the header, straight or through other headers.
including_source() {
  local queue=("$1") seen=" $1 " file
  while ((${#queue[@]})); do
    local name=${queue[0]#src/}
    name=${name#include/}
    queue=("${queue[@]:1}")
    while read -r file; do
      [[ "$file" == *.cc ]] && { echo "$file"; return; }
      [[ "$file" == *.h && "$seen" != *" $file "* ]] && queue+=("$file") && seen+="$file "
    done < <(list '*.cc' '*.h' | xargs grep -lE "#include [\"<]$name[\">]" | sort -r)
  done
  return 0
}

files=()
options=()
if [[ "${1:-}" == --all ]]; then
  options=('--checks=clang-analyzer-*,-clang-analyzer-optin.performance.Padding')
  mapfile -t files < <(list '*.cc')
elif (($#)); then
  files=("$@")
else
  while read -r file; do
    case "$file" in
      *.cc) files+=("$file") ;;
      *.h)
        mapfile -t same < <(list "*/$(basename "$file" .h).cc")
        files+=(${same[@]+"${same[@]}"})
        ((${#same[@]})) || files+=("$(including_source "$file")")
        ;;
    esac
  done < <(changed)
fi

# Only what this build compiles has flags to be read with.
known=()
while read -r file; do
  [[ -n "$file" ]] && grep -qF "\"file\": \"$PWD/$file\"" $build/compile_commands.json && known+=("$file")
done < <(printf '%s\n' ${files[@]+"${files[@]}"} | sort -u)
if ((${#known[@]} == 0)); then
  echo "tidy: no source changed"
  exit 0
fi
echo "tidy: ${#known[@]} file(s)"
# GCC's own options in the compile commands mean nothing to clang.
printf '%s\0' "${known[@]}" |
  xargs -0 -n 1 -P "$(nproc)" "$tidy" -p $build --quiet ${options[@]+"${options[@]}"} --extra-arg=-Wno-unknown-warning-option 2> >(grep -vE 'warnings? (generated|treated)' >&2)
