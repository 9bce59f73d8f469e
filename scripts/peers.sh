#!/usr/bin/env bash
# Times Weft and the libraries that install from PyPI (see bench/README.md). Arguments such as --threads 1,2 go to both scripts.
set -euo pipefail
cd "$(dirname "$0")/.."

cmake --preset shared -Wno-dev --log-level=WARNING
cmake --build --preset shared
[[ -x .venv-peers/bin/python ]] || python3 -m venv .venv-peers
.venv-peers/bin/pip install --quiet -r bench/peers/requirements.txt
for script in gated_delta_rule compressed_attention; do
  .venv-peers/bin/python "bench/peers/$script.py" --markdown "$@"
done
