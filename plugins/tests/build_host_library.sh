#!/usr/bin/env bash
# Builds the kernels for the machine of host_cuda.h, a CPU: build_host_library.sh OUTPUT.so OBJECTS
# OBJECTS is a folder for what is compiled; what has not changed is not compiled again. Takes CXX,
# CUDA_HOME for CUDA's headers, and CXXFLAGS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../kernels"
output="$1"
objects="$2"
mkdir -p "$objects"
read -r -a more <<<"${CXXFLAGS:-}"
flags=(-std=c++17 -O1 -fPIC -ffp-contract=off -Wno-attributes -Wno-unknown-pragmas
    -DTREEWY_ON_HOST -isystem "${CUDA_HOME:-/usr/local/cuda}/include" -include ../tests/host_cuda.h
    "${more[@]}")

is_current() {
    local source
    for source in "$2" ./*.cuh ./*.h ../include/*.h ../tests/*; do
        [ "$1" -nt "$source" ] || return 1
    done
}

linked=()
for source in *.cu; do
    object="$objects/${source%.cu}.o"
    linked+=("$object")
    if is_current "$object" "$source"; then continue; fi
    "${CXX:-g++}" "${flags[@]}" -x c++ -c "$source" -o "$object.$$"
    mv "$object.$$" "$object"
done
# Another process may have the old one loaded.
"${CXX:-g++}" -shared "${more[@]}" -o "$output.$$" "${linked[@]}"
mv "$output.$$" "$output"
