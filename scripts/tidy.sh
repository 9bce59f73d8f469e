#!/usr/bin/env bash
# Lints the sources that changed since the merge base with the default branch, or on that branch since the commit before.
#
#   scripts/tidy.sh            changed sources, uncommitted and new files included
#   scripts/tidy.sh FILE...    these files
#   scripts/tidy.sh --all      every source, with the analyzer as well
#
# A changed header is linted through the sources of the same stem, or else through a source that includes it. CUDA sources are not
# linted, as clang-tidy 14 cannot read the headers of the toolkit.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build-tidy
tidy=$(command -v clang-tidy-14 || command -v clang-tidy) || { echo "tidy: clang-tidy is not installed (scripts/bootstrap.sh --with test)" >&2; exit 1; }
# Compile commands of every source (no unity build), and the one generated header.
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
    # On the default branch: the last commit, or everything in a first commit or a shallow clone.
    base=$(git rev-parse --verify --quiet 'HEAD~1^{commit}' || git hash-object -t tree /dev/null)
  fi
  { git diff --name-only --diff-filter=d "$base"; git ls-files --others --exclude-standard; } | sort -u
}

list() { git ls-files --cached --others --exclude-standard -- "$@"; }

# A source that includes the header, directly or through other headers.
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

# Only sources that this build compiles have compile commands.
known=()
while read -r file; do
  [[ -n "$file" ]] && grep -qF "\"file\": \"$PWD/$file\"" $build/compile_commands.json && known+=("$file")
done < <(printf '%s\n' ${files[@]+"${files[@]}"} | sort -u)
if ((${#known[@]} == 0)); then
  echo "tidy: no source changed"
  exit 0
fi
echo "tidy: ${#known[@]} file(s)"
# The compile commands are GCC's; clang does not know all of their warning options.
printf '%s\0' "${known[@]}" |
  xargs -0 -n 1 -P "$(nproc)" "$tidy" -p $build --quiet ${options[@]+"${options[@]}"} --extra-arg=-Wno-unknown-warning-option 2> >(grep -vE 'warnings? (generated|treated)' >&2)
