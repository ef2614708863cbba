#!/usr/bin/env bash
# Compiles the CUDA kernels to build/libtreewy.so: plugins/kernels behind plugins/include/treewy.h.
# Takes nvcc 13 and no GPU. What has not changed is not compiled again.
#
# Environment:
#   NVCC                 the compiler (nvcc on PATH, or in CUDA_HOME)
#   TREEWY_CUDA_ARCHS    GPU architectures, as in "90 100" (80 89 90 100 103 120, and PTX of the last)
#   TREEWY_BUILD_DIR     where to build (build)
#   TREEWY_BUILD_JOBS    files compiled at once (the number of processors)
#   TREEWY_NVCC_FLAGS    more flags, as in "-Xptxas -v"
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
# shellcheck source=plugins/build_common.sh
. plugins/build_common.sh

ALL_ARCHS="80 89 90 100 103 120"
BUILD="${TREEWY_BUILD_DIR:-build}"
OBJECTS="$BUILD/kernels"
LIBRARY="$BUILD/libtreewy.so"
JOBS="${TREEWY_BUILD_JOBS:-$(nproc 2>/dev/null || echo 1)}"

# Prints one flag a line.
target_flags() {
    local arch last=""
    local -a archs
    read -r -a archs <<<"${TREEWY_CUDA_ARCHS:-$ALL_ARCHS}"
    [ ${#archs[@]} -gt 0 ] || die "TREEWY_CUDA_ARCHS names no architecture"
    for arch in "${archs[@]}"; do
        [[ "$arch" =~ ^[0-9]+[af]?$ ]] ||
            die "TREEWY_CUDA_ARCHS: $arch is not an architecture such as 90"
        # The products of warpgroups are in code for 90a alone, which is all that a GPU of 9.0 runs.
        [ "$arch" = 90 ] && echo "--generate-code=arch=compute_90a,code=sm_90a" ||
            echo "--generate-code=arch=compute_$arch,code=sm_$arch"
        last="$arch"
    done
    # PTX, which the driver compiles on GPUs that came later; an "a" or "f" architecture has none.
    if [[ "$last" =~ ^[0-9]+$ ]]; then
        echo "--generate-code=arch=compute_$last,code=compute_$last"
    fi
}

compiler="$(find_nvcc)"
targets="$(target_flags)"
mapfile -t gencode <<<"$targets"
read -r -a more <<<"${TREEWY_NVCC_FLAGS:-}"
compile=("$compiler" -std=c++17 -O3 -lineinfo "${gencode[@]}"
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra" --threads=0 "${more[@]}")
# CUDA's runtime and C++'s inside, and hidden, so that the library runs where neither is installed
# and beside others that have their own.
link=("$compiler" -shared --cudart=static "${gencode[@]}"
    "-Xcompiler=-static-libstdc++,-static-libgcc" -Xlinker=--exclude-libs=ALL)

mkdir -p "$OBJECTS"
shopt -s nullglob
headers=(plugins/include/*.h plugins/kernels/*.cuh plugins/kernels/*.h)
objects=()
running=0
for source in plugins/kernels/*.cu; do
    object="$OBJECTS/$(basename "$source" .cu).o"
    objects+=("$object")
    needs_build "$object" "${compile[*]} -c $source" "$source" "${headers[@]}" || continue
    if [ "$running" -ge "$JOBS" ]; then
        wait -n || die "compiling failed, see above"
        running=$((running - 1))
    fi
    printf '    compiling %s\n' "$source"
    make_target "$object" "${compile[@]}" -c "$source" &
    running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
    wait -n || die "compiling failed, see above"
    running=$((running - 1))
done
if needs_build "$LIBRARY" "${link[*]} ${objects[*]}" "${objects[@]}"; then
    make_target "$LIBRARY" "${link[@]}" "${objects[@]}" || die "linking failed, see above"
    printf '    built %s\n' "$LIBRARY"
fi
