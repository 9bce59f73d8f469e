#!/usr/bin/env bash
# The committed SPIR-V in src/vulkan/spirv, which builds without glslangValidator embed.
#
#   scripts/spirv.sh update FOLDER   replaces it by the modules that a build made in FOLDER (build/spirv)
#   scripts/spirv.sh check FOLDER    runs spirv-val on both sets and compares them; exit status 77 where another version of glslang made FOLDER,
#                                    whose bytes may differ, or where a tool is missing
set -euo pipefail
cd "$(dirname "$0")/.."
committed=src/vulkan/spirv
if [[ $# -ne 2 || ! "$1" =~ ^(update|check)$ ]]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
folder=$2
if ! version=$(glslangValidator --version 2>/dev/null | head -n 1); then
  echo "spirv: glslangValidator is not installed, so there is nothing to compare the committed SPIR-V with"
  exit 77
fi

if [[ $1 == update ]]; then
  mkdir -p "$committed"
  rm -f "$committed"/*.spv
  cp "$folder"/*.spv "$committed"
  echo "$version" >"$committed/VERSION"
  exit 0
fi

if ! command -v spirv-val >/dev/null; then
  echo "spirv: spirv-val is not installed"
  exit 77
fi
faults=0
for module in "$committed"/*.spv "$folder"/*.spv; do
  spirv-val --target-env vulkan1.2 --scalar-block-layout "$module" || { echo "spirv: $module is not valid"; faults=1; }
done
if [[ "$version" != "$(cat "$committed/VERSION")" ]]; then
  echo "spirv: made by '$version', committed by '$(cat "$committed/VERSION")', so their bytes are not compared"
  exit $((faults ? 1 : 77))
fi
names() { (cd "$1" && ls ./*.spv); }
diff <(names "$committed") <(names "$folder") || { echo "spirv: the sets of modules differ"; faults=1; }
for module in "$committed"/*.spv; do
  cmp -s "$module" "$folder/${module##*/}" || { echo "spirv: ${module##*/} was not made from its shader; run make spirv"; faults=1; }
done
((faults == 0)) && echo "spirv: $(names "$committed" | wc -l) modules are valid and those of their shaders"
exit $faults
