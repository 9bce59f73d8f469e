#!/usr/bin/env bash
# Keeps the parts of the documents that come from the sources and the command current: the example in docs/link.md, the tables in docs/ops.md, that
# of speeds in README.md, the type stubs and docstrings of the Python package (scripts/python_stubs.py).
#
#   scripts/update_docs.sh [COMMAND]           rewrites them
#   scripts/update_docs.sh --check [COMMAND]   fails, with the difference, if one is stale
#
# COMMAND is the weft command to ask, build/weft unless given. A command built without the cuda or the vulkan backend cannot know that column:
# the table of ops then stays, and only its other columns are checked. Without cuda the table of speeds stays, too. Tables of measurements are the work of scripts/results.py.
set -euo pipefail
cd "$(dirname "$0")/.."
check=0
[[ "${1:-}" == --check ]] && { check=1; shift; }
command=${1:-build/weft}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{ echo '```cpp'; cat examples/decode_step.cc; echo '```'; } >"$work/example"
"$command" ops --markdown >"$work/ops"
"$command" ops --speed --markdown >"$work/speeds"
grep -E '^\| op |^\|-|^\| `(gated_delta_rule_prefill|compressed_attention)`' "$work/speeds" >"$work/speeds_short"
"$command" ops --members >"$work/members"
"$command" devices --json >"$work/devices"

# Replaces the lines between "<!-- name:begin -->" and "<!-- name:end -->".
python3 - "$work" <<'PYTHON'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
pages = {page: pathlib.Path(page).read_text() for page in ("docs/link.md", "docs/ops.md", "README.md")}
devices = json.loads((work / "devices").read_text())["devices"]
built = {d["backend"] for d in devices if "not in this build" not in d["why_not"]}
for name, page, source in (("example", "docs/link.md", "example"), ("ops", "docs/ops.md", "ops"), ("members", "docs/ops.md", "members"),
                           ("speeds", "docs/ops.md", "speeds"), ("speeds", "README.md", "speeds_short")):
    text = pages[page]
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    tail = rest.partition(end)
    if not found or not tail[1]:
        sys.exit(f"update_docs: {page} lacks the markers of {name}")
    made = (work / source).read_text()
    if name == "speeds" and "cuda" not in built:
        made = tail[0]
    if name == "ops" and not {"cuda", "vulkan"} <= built:
        rows = lambda table: [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        columns = lambda table: {op.strip(): [row[1:4]] + [row[i] for i, backend in ((4, "cuda"), (5, "vulkan")) if backend in built] for row in rows(table) for op in row[0].split(",")}
        if columns(made) == columns(tail[0]):
            made = tail[0]
    pages[page] = head + begin + made + end + tail[2]
for page, text in pages.items():
    (work / pathlib.Path(page).name).write_text(text)
PYTHON

stale=0
for page in docs/link.md docs/ops.md README.md; do
  if ((check)); then
    diff -u "$page" "$work/${page#docs/}" || { echo "$page is stale: run make update-docs" >&2; stale=1; }
  else
    cp "$work/${page#docs/}" "$page"
  fi
done
check_flag=()
((check)) && check_flag=(--check)
"$command" ops --schema | scripts/python_stubs.py "${check_flag[@]}" || stale=1
exit "$stale"
