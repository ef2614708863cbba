# shellcheck shell=bash
# What the build scripts of this folder share; sourced by them.

die() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

find_nvcc() {
    local candidate
    for candidate in "${NVCC:-}" nvcc "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
        if [ -n "$candidate" ] && command -v "$candidate"; then return; fi
        [ "$candidate" != "${NVCC:-}" ] || [ -z "$candidate" ] || die "NVCC=$candidate does not run"
    done
    die "no nvcc found: install CUDA 13, or say where it is with NVCC=/path/to/nvcc"
}

# needs_build TARGET COMMAND SOURCE...: whether the command or a source changed since.
needs_build() {
    local target="$1" command="$2" source
    shift 2
    [ -e "$target" ] && [ "$(cat "$target.command" 2>/dev/null)" = "$command" ] || return 0
    for source in "$@"; do
        [ ! "$source" -nt "$target" ] || return 0
    done
    return 1
}

# make_target TARGET COMMAND...: the target appears only if the command succeeds.
make_target() {
    local target="$1"
    shift
    rm -f "$target" "$target.command"
    "$@" -o "$target.part" || return 1
    mv "$target.part" "$target"
    printf '%s' "$*" >"$target.command"
}
