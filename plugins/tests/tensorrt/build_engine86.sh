#!/usr/bin/env bash
# Builds the test target for TensorRT 8.6: build_engine86.sh FOLDER, to FOLDER/libengine86.so and
# FOLDER/libnvinfer_plugin.so.8 (the stand-in). Links the kernels of TREEWY_BUILD_DIR (build), made
# by plugins/build_library.sh before. Takes CXX, NVCC, and
#   TENSORRT86_INCLUDE   folder of TensorRT 8.6's headers (the repository NVIDIA/TensorRT, tag v8.6.0)
set -euo pipefail
folder="$(mkdir -p "$1" && cd "$1" && pwd -P)"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
build="${TREEWY_BUILD_DIR:-build}"
nvcc="${NVCC:-nvcc}"
cuda="$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")/include"
[ -f "$cuda/cuda_runtime_api.h" ] || cuda="${CUDA_HOME:-/usr/local/cuda}/include"
flags=(-std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wpedantic -Werror
    -Wno-deprecated-declarations -isystem "${TENSORRT86_INCLUDE:?}" -isystem "$cuda")
objects=()
for source in plugins/tests/tensorrt/{engine86,fence_v2,plugin_v2}.cpp plugins/tensorrt/*.cpp; do
    case "$source" in
        # The adapter to TensorRT 10 and 11, of which 8.6 knows nothing.
        */plugin_v3.cpp | */library.cpp | */tensorrt_library.cpp) continue ;;
    esac
    objects+=("$folder/$(basename "$source" .cpp).o")
    "${CXX:-g++}" "${flags[@]}" -c "$source" -o "${objects[-1]}"
done
for source in plugins/kernels/*.cu; do
    objects+=("$build/kernels/$(basename "$source" .cu).o")
done
"$nvcc" -shared --cudart=static "-Xcompiler=-static-libstdc++,-static-libgcc" \
    "-Xlinker=--exclude-libs=ALL,-Bsymbolic" -o "$folder/libengine86.so" "${objects[@]}"
"${CXX:-g++}" -shared -fPIC -Wl,-soname,libnvinfer_plugin.so.8 \
    -o "$folder/libnvinfer_plugin.so.8" plugins/tests/tensorrt/nvinfer_plugin_stub.cpp
