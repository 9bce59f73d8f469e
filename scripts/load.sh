#!/usr/bin/env bash
# Load on `weft serve` with the bundled model, on the loopback address.
#
#   scripts/load.sh [-o FILE]   measures 1, 8 and 64 clients, `weft speed` at the same batch, streams beside long prompts, and the
#                               second turn of a session of 8,000 tokens; writes JSON
#   scripts/load.sh --check     64 clients for 60 s, then 10,000 requests: no error, every text as for one client, memory within the
#                               budget, no growth
#
# BUILD names the build folder (default build), COMMIT the commit where this is no git checkout. With four cores or more, server and
# client have cores of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
build=${BUILD:-build}
check=0
file=
case "${1:-}" in
  --check) check=1 ;;
  -o) file=$2 ;;
  '') ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

cores=$(nproc)
server=()
client=()
threads=$cores
if ((cores >= 4)); then
  threads=$((cores - 2))
  server=(taskset -c "0-$((threads - 1))")
  client=(taskset -c "$threads-$((cores - 1))")
fi
log=$(mktemp -d)
process=
start() { # options of weft serve; sets process and port
  "${server[@]}" "$build/weft" serve --port 0 --threads "$threads" "$@" >"$log/out" 2>"$log/err" &
  process=$!
  for _ in $(seq 200); do grep -q http "$log/out" && break; sleep 0.1; done
  port=$(sed -n 's/.*:\([0-9]*\) on .*/\1/p' "$log/out")
  [[ -n "$port" ]] || { cat "$log/err" >&2; exit 1; }
}
finish() {
  kill -TERM "$process"
  wait "$process"
}
trap 'kill "$process" 2>/dev/null || true; rm -rf "$log"' EXIT
start --max-sequences 64 --max-queue 256 --capacity 1024 --memory 512M

resident() { awk '/^VmRSS/ { print $2 * 1024 }' "/proc/$process/status"; }
metric() { python3 -c 'import sys, urllib.request
for line in urllib.request.urlopen(sys.argv[1]).read().decode().splitlines():
    if line.startswith(sys.argv[2] + " "): print(int(float(line.split()[-1])))' "http://127.0.0.1:$port/metrics" "$1"; }

if ((check)); then
  "${client[@]}" "$build/weft_load" --port "$port" --clients 64 --seconds 60
  before=$(resident)
  "${client[@]}" "$build/weft_load" --port "$port" --clients 64 --requests 10000 --tokens 4
  after=$(resident)
  used=0
  for kind in recurrent kv sessions prefix_store scratch; do used=$((used + $(metric "weft_memory_bytes{kind=\"$kind\"}"))); done
  budget=$(metric weft_memory_budget_bytes)
  echo "memory: $used bytes of a budget of $budget; the process had $before bytes before 10,000 requests and has $after"
  ((used <= budget)) || { echo "load: the memory is above the budget" >&2; exit 1; }
  # Allocators keep some pages; a leak of 1 kB per request would be 10 MB.
  ((after - before < 8000000)) || { echo "load: the process grew by $((after - before)) bytes" >&2; exit 1; }
  finish
  exit 0
fi

busy=$(cut -d' ' -f1 /proc/loadavg)
"${client[@]}" "$build/weft_load" --port "$port" --clients 1,8,64 --json >"$log/load.json"
finish
# Prompts of about 1,500 tokens, none of them known, are read beside the streams of the other clients.
start --max-sequences 8 --capacity 4096 --prefix-store 0
"${client[@]}" "$build/weft_load" --port "$port" --clients 8 --repeat 500 --json >"$log/long.json"
finish
start --max-sequences 2 --capacity 16384
"${client[@]}" "$build/weft_load" --port "$port" --second-turn 8000 --tokens 64 --json >"$log/turn.json"
finish
"${server[@]}" "$build/weft" speed --batch 1 8 64 --prompt 16 --decode 64 --threads "$threads" --json >"$log/speed.json"
python3 - "$log" "${COMMIT:-$(git rev-parse HEAD)}" "$threads" "$busy" "${file:-/dev/stdout}" <<'EOF'
import json, os, pathlib, platform, re, sys
folder, commit, threads, busy, file = sys.argv[1:]
load, long, turn, speed = (json.loads(pathlib.Path(folder, name + ".json").read_text()) for name in ("load", "long", "turn", "speed"))
cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
report = {"schema": 1, "commit": commit, "device": cpu.group(1) if cpu else platform.machine(), "driver": f"{platform.system()} {platform.release()}",
          "command": "make load", "processors": os.cpu_count(), "load_before": float(busy), "server_threads": int(threads), "max_stall_ms": 200,
          **load, "long_prompts": long["runs"][0], "second_turn": turn, "speed": speed}
with open(file, "w") as out:
    json.dump(report, out, indent=2)
    out.write("\n")
EOF
[[ -z "$file" ]] || echo "wrote $file"
