#!/usr/bin/env bash
# Builds what the tests of the plugins run: build_host_plugin.sh FOLDER [KERNEL_OBJECTS]
#   FOLDER/libplugin_host.so               drives a plugin library as TensorRT does
#   FOLDER/libtreewy_tensorrt_host.so      the plugins over kernels played on the CPU: with the
#                                          objects that plugins/tests/build_host_library.sh made
# Takes CXX, CUDA_HOME for CUDA's headers, TENSORRT_INCLUDE for TensorRT's, and CXXFLAGS.
set -euo pipefail
folder="$(mkdir -p "$1" && cd "$1" && pwd -P)"
kernels="${2:-}"
[ -z "$kernels" ] || kernels="$(cd "$kernels" && pwd -P)"
cd "$(dirname "${BASH_SOURCE[0]}")/../../tensorrt"
read -r -a more <<<"${CXXFLAGS:-}"
flags=(-std=c++17 -O1 -fPIC -fvisibility=hidden -Wall -Wextra -Wpedantic -Werror
    -isystem "${TENSORRT_INCLUDE:?}" -isystem "${CUDA_HOME:-/usr/local/cuda}/include" "${more[@]}")

is_current() {
    local source
    for source in "$2" ./*.h ../include/*.h ../tests/tensorrt/*.h \
        ../tests/tensorrt/build_host_plugin.sh; do
        [ ! -e "$source" ] || [ "$1" -nt "$source" ] || return 1
    done
}

# compile SOURCE: prints the object.
compile() {
    set -e # a substitution starts without it
    local object
    object="$folder/$(basename "$1" .cpp).o"
    if ! is_current "$object" "$1"; then
        "${CXX:-g++}" "${flags[@]}" -c "$1" -o "$object.$$" >&2
        mv "$object.$$" "$object"
    fi
    printf '%s\n' "$object"
}

# link OUTPUT OBJECT...; another process may have the old one loaded.
link() {
    local output="$1"
    shift
    "${CXX:-g++}" -shared "${more[@]}" -o "$output.$$" "$@" -ldl
    mv "$output.$$" "$output"
}

object="$(compile ../tests/tensorrt/plugin_host.cpp)"
link "$folder/libplugin_host.so" "$object"
[ -n "$kernels" ] || exit 0
objects=()
for source in ../tests/tensorrt/host_runtime.cpp ./*.cpp; do
    object="$(compile "$source")"
    objects+=("$object")
done
for source in ../kernels/*.cu; do
    objects+=("$kernels/$(basename "$source" .cu).o")
done
link "$folder/libtreewy_tensorrt_host.so" "${objects[@]}" \
    "-Wl,-Bsymbolic,--version-script=exports.map"
