#!/usr/bin/env bash
# Compiles the TensorRT plugins to build/libtreewy_tensorrt.so, with the kernels inside: run
# build_library.sh before, whose objects it links. Takes a C++ compiler, nvcc 13 to link with and
# TensorRT's headers (tensorrt_headers.sh finds them); no TensorRT library and no GPU.
#
# Environment:
#   CXX, NVCC            the compilers (g++, nvcc)
#   TENSORRT_ROOT        TensorRT's folder, for its headers
#   TREEWY_BUILD_DIR     where to build (build)
#   TREEWY_CXX_FLAGS     more flags, as in "-g -Werror"
set -euo pipefail
PLUGINS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
cd "$PLUGINS/.."
# shellcheck source=plugins/build_common.sh
. "$PLUGINS/build_common.sh"

BUILD="${TREEWY_BUILD_DIR:-build}"
LIBRARY="$BUILD/libtreewy_tensorrt.so"
EXPORTS="plugins/tensorrt/exports.map"

nvcc="$(find_nvcc)"
headers="$(plugins/tensorrt_headers.sh)"
cuda="$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")/include"
[ -f "$cuda/cuda_runtime_api.h" ] || cuda="${CUDA_HOME:-/usr/local/cuda}/include"
[ -f "$cuda/cuda_runtime_api.h" ] || die "CUDA's headers were not found beside $nvcc; set CUDA_HOME"

kernels=()
for source in plugins/kernels/*.cu; do
    kernels+=("$BUILD/kernels/$(basename "$source" .cu).o")
    [ -f "${kernels[-1]}" ] ||
        die "${kernels[-1]} is missing: run plugins/build_library.sh first"
done

read -r -a more <<<"${TREEWY_CXX_FLAGS:-}"
compile=("${CXX:-g++}" -std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wpedantic
    -isystem "$headers" -isystem "$cuda" "${more[@]}")
# As for the kernels' own library, nothing of CUDA's or C++'s runtimes is needed or shown, and calls
# between its parts stay inside whatever else the process has loaded.
link=("$nvcc" -shared --cudart=static "-Xcompiler=-static-libstdc++,-static-libgcc"
    "-Xlinker=--exclude-libs=ALL,-Bsymbolic,--version-script=$EXPORTS,--no-undefined")

mkdir -p "$BUILD/tensorrt"
sources=(plugins/tensorrt/*.h plugins/include/*.h "$headers/NvInferVersion.h")
objects=()
for source in plugins/tensorrt/*.cpp; do
    object="$BUILD/tensorrt/$(basename "$source" .cpp).o"
    objects+=("$object")
    needs_build "$object" "${compile[*]} -c $source" "$source" "${sources[@]}" || continue
    printf '    compiling %s\n' "$source"
    make_target "$object" "${compile[@]}" -c "$source" || die "compiling failed, see above"
done
if needs_build "$LIBRARY" "${link[*]} ${objects[*]} ${kernels[*]}" \
    "${objects[@]}" "${kernels[@]}" "$EXPORTS"; then
    make_target "$LIBRARY" "${link[@]}" "${objects[@]}" "${kernels[@]}" ||
        die "linking failed, see above"
    printf '    built %s\n' "$LIBRARY"
fi
