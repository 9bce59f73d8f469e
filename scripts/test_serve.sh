#!/usr/bin/env bash
# Tests `weft serve` from outside, with packages of PyPI in an environment of their own.
#
#   scripts/test_serve.sh [BUILD_DIR]                       the official openai client
#   scripts/test_serve.sh --page [BUILD_DIR] [FOLDER]       the page in Chromium; FOLDER gets screenshots
#
# BUILD_DIR is build/ unless named.
set -euo pipefail
cd "$(dirname "$0")/.."
page=0
[[ "${1:-}" == --page ]] && { page=1; shift; }
build=${1:-build}
environment=.venv-serve
[[ -x "$environment/bin/python" ]] || python3 -m venv "$environment"
"$environment/bin/python" -c 'import openai, selenium' 2>/dev/null || "$environment/bin/pip" install -q --disable-pip-version-check openai selenium
WEFT_COMMAND="$(realpath "$build")/weft"
export WEFT_COMMAND
if ((page)); then exec "$environment/bin/python" tests/serve/page_test.py ${2:+--pictures "$2"}; fi
exec "$environment/bin/python" tests/serve/openai_test.py
