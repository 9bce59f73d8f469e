#!/usr/bin/env bash
# Installs the packages that building and testing Weft needs and this machine lacks (Debian-like systems; others get the list).
#
#   scripts/bootstrap.sh                what `make run` needs
#   scripts/bootstrap.sh --with test    also what `make test` needs: fuzzer, ThreadSanitizer, format check and lint
#   scripts/bootstrap.sh --with neon    also what `make test-neon` needs: an aarch64 compiler, its libraries and qemu
#   scripts/bootstrap.sh --with python  also what `make wheel` needs
#   scripts/bootstrap.sh --with peers   also what `make peers` needs
#   scripts/bootstrap.sh --with llama   also what `make llama` needs
#   scripts/bootstrap.sh --with pictures  also what `make pictures` needs
#   scripts/bootstrap.sh --with page    also what the test of the server's page needs: a browser
#   scripts/bootstrap.sh --with docs    also what `make docs` needs
#   scripts/bootstrap.sh --list         prints packages and reasons, installs nothing
set -euo pipefail

base_packages=(
  "g++|compiles the library (C++20, OpenMP included)"
  "cmake|configures the build (3.25 or newer)"
  "ninja-build|runs the build"
  "pkg-config|finds libraries; the install test uses it as a user would"
  "git|names the commit in benchmark reports, lists files to format and lint"
  "libhwy-dev|Highway: SIMD kernels with run-time dispatch"
  "libgtest-dev|GoogleTest: the test suite, configured with the rest"
  "libcli11-dev|CLI11: options of the weft command"
  "nlohmann-json3-dev|JSON that the weft command reads and writes"
  "libutf8proc-dev|Unicode's categories and normal forms, for tokenizers"
  "libxxhash-dev|checksums of state files"
  "libfmt-dev|fmt: text of the weft command"
  "libboost-dev|Boost.Beast and Asio: HTTP of weft serve"
  "libvulkan-dev|headers of Vulkan, whose loader is opened at run time"
  "glslang-tools|compiles the shaders of the vulkan backend"
  "libedit-dev|libedit: line editing of weft chat, loaded when it runs"
  "python3|refreshes and checks the generated parts of the documents"
)
test_packages=(
  "clang-14|libFuzzer and ThreadSanitizer builds"
  "libclang-rt-14-dev|sanitizer and fuzzer runtimes of clang"
  "libomp-14-dev|OpenMP of clang, for lint and ThreadSanitizer"
  "clang-format-14|the format check"
  "clang-tidy-14|lint of what changed"
  "python3-venv|holds the Python wheel while it is tested"
  "mesa-vulkan-drivers|lavapipe, a Vulkan driver that computes on the processor: runs the vulkan backend's tests"
  "vulkan-validationlayers|checks the vulkan backend's use of Vulkan"
  "spirv-tools|checks the shaders of the vulkan backend"
)
python_packages=(
  "python3-venv|holds the tools that build the Python wheel: scikit-build-core and auditwheel, from PyPI"
)
# The NEON kernels are cross-compiled and run under qemu, unless this machine is an aarch64 one.
neon_packages=(
  "g++-aarch64-linux-gnu|cross-compiles for aarch64"
  "qemu-user|runs aarch64 tests on this machine"
  "libhwy-dev:arm64|Highway for aarch64"
  "libgtest-dev:arm64|GoogleTest for aarch64"
  "libutf8proc-dev:arm64|Unicode for aarch64"
  "libxxhash-dev:arm64|checksums for aarch64"
  "libgomp1:arm64|OpenMP runtime for aarch64"
)

peers_packages=(
  "python3-venv|holds the wheels of the libraries that Weft is compared with"
)
llama_packages=(
  "python3-venv|holds pip, which fetches the source of llama.cpp, and the packages that write GGUF files"
)
pictures_packages=(
  "python3-matplotlib|draws docs/pictures from the measurements"
)
page_packages=(
  "chromium|shows the page of weft serve"
  "chromium-driver|lets the test type and click in it"
)
docs_packages=(
  "doxygen|the HTML reference of the public headers"
)

list_only=0
neon=0
testing=0
extra=()
while (($#)); do
  case "$1" in
    --list) list_only=1 ;;
    --with)
      shift
      case "${1:-}" in
        test) extra+=("${test_packages[@]}"); testing=1 ;;
        neon) neon=1 ;;
        python) extra+=("${python_packages[@]}") ;;
        peers) extra+=("${peers_packages[@]}") ;;
        llama) extra+=("${llama_packages[@]}") ;;
        pictures) extra+=("${pictures_packages[@]}") ;;
        page) extra+=("${page_packages[@]}") ;;
        docs) extra+=("${docs_packages[@]}") ;;
        *) echo "bootstrap: --with knows 'test', 'neon', 'python', 'peers', 'llama', 'pictures', 'page' and 'docs', got '${1:-}'" >&2; exit 2 ;;
      esac
      ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "bootstrap: unknown option '$1' (see --help)" >&2; exit 2 ;;
  esac
  shift
done

wanted=("${base_packages[@]}" "${extra[@]}")
((neon)) && wanted+=("${neon_packages[@]}")

print_list() {
  local entry
  for entry in "$@"; do printf '  %-24s %s\n' "${entry%%|*}" "${entry#*|}"; done
}

if ((list_only)); then
  print_list "${wanted[@]}"
  exit 0
fi

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  missing_tools=()
  for tool in g++ cmake ninja pkg-config python3; do command -v "$tool" >/dev/null || missing_tools+=("$tool"); done
  if ((${#missing_tools[@]})); then
    echo "bootstrap: this is not a Debian-like system, and it lacks: ${missing_tools[*]}" >&2
    echo "Please install the equivalents of these Debian packages, then run make again:" >&2
    print_list "${wanted[@]}" >&2
    exit 1
  fi
  echo "bootstrap: not a Debian-like system, so nothing is installed. If the build misses something, these are the Debian names:" >&2
  print_list "${wanted[@]}" >&2
  exit 0
fi

# cuda_plans_test reads the resources of compiled kernels with cuobjdump. Some toolkits come without it; PyPI has it alone (1 MB).
install_cuobjdump() {
  local nvcc folder=.cache/cuobjdump
  nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || return 0
  [[ -x "$(dirname "$(readlink -f "$nvcc")")/cuobjdump" || -d "$folder" ]] && return 0
  command -v cuobjdump >/dev/null && return 0
  echo "bootstrap: installing cuobjdump into $folder (the CUDA toolkit has none; cuda_plans_test needs it)" >&2
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" nvidia-cuda-cuobjdump==13.4.92 >&2 ||
    echo "bootstrap: pip could not install it; cuda_plans_test will be skipped" >&2
}
if ((testing)); then (cd "$(dirname "$0")/.." && install_cuobjdump); fi

architecture=$(dpkg --print-architecture)
if ((neon)) && [[ "$architecture" == arm64 ]]; then
  wanted=("${base_packages[@]}" "${extra[@]}")
  neon=0
fi

# "name" or "name:arch" of everything installed, in one query.
installed=$(dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Package}:${Architecture}\n' 2>/dev/null | sed -n 's/^.i  *//p')
missing=()
for entry in "${wanted[@]}"; do
  package=${entry%%|*}
  [[ "$package" == *:* ]] || { grep -qE "^${package//+/\\+} ${package//+/\\+}:($architecture|all)$" <<<"$installed" && continue; }
  [[ "$package" == *:* ]] && grep -qE " ${package//+/\\+}$" <<<"$installed" && continue
  missing+=("$entry")
done
((${#missing[@]})) || exit 0

echo "bootstrap: installing ${#missing[@]} missing package(s):" >&2
print_list "${missing[@]}" >&2

as_root=()
if ((EUID != 0)); then
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  elif command -v sudo >/dev/null && [[ -t 0 ]]; then
    as_root=(sudo)
  else
    echo "bootstrap: needs root to install them; run as root, or:" >&2
    ((neon)) && echo "  dpkg --add-architecture arm64" >&2
    echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]%%|*}" >&2
    exit 1
  fi
fi

if ((neon)) && ! dpkg --print-foreign-architectures | grep -qx arm64; then
  "${as_root[@]}" dpkg --add-architecture arm64
fi
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300)
"${apt[@]}" update -qq >/dev/null
if ! "${apt[@]}" install -y -qq --no-install-recommends "${missing[@]%%|*}" >/dev/null; then
  echo "bootstrap: apt-get could not install all of them (messages above). Weft needs:" >&2
  print_list "${wanted[@]}" >&2
  exit 1
fi
