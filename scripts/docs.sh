#!/usr/bin/env bash
# Builds the HTML reference of the public headers, with the guides, in build-docs/html. A warning of Doxygen is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v doxygen >/dev/null || { echo "docs: doxygen is not installed (scripts/bootstrap.sh --with docs)" >&2; exit 1; }
version=$(sed -n 's/.*define WEFT_VERSION_[A-Z]* //p' include/weft/version.h | paste -sd.)
rm -rf build-docs
mkdir build-docs
# Settings that hold a path: it tells the main page from other pages called README.md, and is left out of names.
{
  cat docs/Doxyfile
  echo "PROJECT_NUMBER = $version"
  echo "USE_MDFILE_AS_MAINPAGE = \"$PWD/README.md\""
  echo "STRIP_FROM_PATH = \"$PWD/include\" \"$PWD\""
} | doxygen -
echo "build-docs/html/index.html"
