#!/usr/bin/env bash
# Keeps the generated parts of README.md equal to their sources: the example and the support table.
#
#   scripts/update_readme.sh [COMMAND]           rewrites them
#   scripts/update_readme.sh --check [COMMAND]   fails, with the difference, if they are stale
#
# COMMAND is the weft command to ask, build/weft unless given. One built without the cuda backend cannot know that column: the table is
# then left, and only its other columns are checked.
set -euo pipefail
cd "$(dirname "$0")/.."
check=0
[[ "${1:-}" == --check ]] && { check=1; shift; }
command=${1:-build/weft}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{ echo '```cpp'; cat examples/decode_step.cc; echo '```'; } >"$work/example"
"$command" ops --markdown >"$work/ops"
"$command" devices --json >"$work/devices"

# Replaces what stands between "<!-- name:begin -->" and "<!-- name:end -->".
python3 - "$work" >"$work/README.md" <<'PYTHON'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
text = pathlib.Path("README.md").read_text()
for name in ("example", "ops"):
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    tail = rest.partition(end)
    if not found or not tail[1]:
        sys.exit(f"update_readme: README.md lacks the markers of {name}")
    made = (work / name).read_text()
    if name == "ops" and not any(d["backend"] == "cuda" and "build" not in d["why_not"] for d in json.loads((work / "devices").read_text())["devices"]):
        rows = lambda table: [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        columns = lambda table: {op.strip(): row[1:4] for row in rows(table) for op in row[0].split(",")}
        if columns(made) == columns(tail[0]):
            made = tail[0]
    text = head + begin + made + end + tail[2]
sys.stdout.write(text)
PYTHON

if ((check)); then
  diff -u README.md "$work/README.md" || { echo "README.md is stale: run make readme" >&2; exit 1; }
else
  cp "$work/README.md" README.md
fi
