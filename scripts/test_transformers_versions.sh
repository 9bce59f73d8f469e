#!/usr/bin/env bash
# Runs the tests of weft.transformers with every version of transformers that weft.transformers.VERSIONS names.
#
#   scripts/test_transformers_versions.sh PYTHON    PYTHON has weft, torch and pytest: .venv-torch/bin/python after make test-python
#
# Every version is installed with its own dependencies into a temporary folder, from PyPI.
set -uo pipefail

python=$(realpath -s "${1:?the Python to use}")
cd "$(dirname "$0")/../python/tests/torch"

versions=$("$python" -c 'import weft.transformers; print(*weft.transformers.VERSIONS)') || exit 1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
for version in $versions; do
  echo "== transformers $version"
  "$python" -m pip install -q --disable-pip-version-check --target "$folder/$version" "transformers==$version.*" || { failed=1; continue; }
  PYTHONPATH="$folder/$version${PYTHONPATH:+:$PYTHONPATH}" "$python" -m pytest -q -p no:cacheprovider test_transformers.py test_calls.py || failed=1
done
exit $failed
