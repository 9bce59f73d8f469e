#!/usr/bin/env bash
# Formats the tracked and new C and C++ sources, or with --check names those that differ and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
files() { git ls-files -z --cached --others --exclude-standard -- '*.c' '*.cc' '*.h' '*.cu' '*.cuh'; }
formatter=$(command -v clang-format-14 || command -v clang-format) || { echo "format: clang-format is not installed (scripts/bootstrap.sh --with test)" >&2; exit 1; }
if [[ "${1:-}" == --check ]]; then
  files | xargs -0 "$formatter" --dry-run -Werror
else
  files | xargs -0 "$formatter" -i
fi
