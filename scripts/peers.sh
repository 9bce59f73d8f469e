#!/usr/bin/env bash
# Times Weft beside the libraries that install from PyPI (see bench/README.md). Arguments go to both scripts: --threads 1,2 --seconds 2 ...
set -euo pipefail
cd "$(dirname "$0")/.."

cmake -S . -B build-shared -G Ninja -Wno-dev --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DWEFT_BUILD_TESTS=OFF -DWEFT_CUDA=OFF
cmake --build build-shared --target weft
[[ -x .venv-peers/bin/python ]] || python3 -m venv .venv-peers
.venv-peers/bin/pip install --quiet -r bench/peers/requirements.txt
for script in gated_delta_rule compressed_attention; do
  .venv-peers/bin/python "bench/peers/$script.py" --markdown "$@"
done
