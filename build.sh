#!/usr/bin/env bash
# The one entry for people and CI: see usage() below, or ./build.sh help.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
cd "$ROOT"

VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
MODEL="examples/treewy-tiny"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
# Python versions that pyproject.toml allows, as a test that Python itself can run.
VERSION_TEST='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'

# Another Python's settings must not leak into ours, and pip must install into .venv.
unset PYTHONHOME PYTHONPATH
export PIP_USER=no PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1
export RUFF_CACHE_DIR="$ROOT/.cache/ruff"
# Without a home to write to there is no cache of downloads; pip would only warn about it.
if [ -z "${PIP_CACHE_DIR:-}${XDG_CACHE_HOME:-}" ] && [ ! -w "${HOME:-/nonexistent}" ]; then
    export PIP_NO_CACHE_DIR=1
fi
# pip and pytest end by themselves on Ctrl-C; what follows them must not run then.
trap 'exit 130' INT

usage() {
    cat <<'TEXT'
Usage: ./build.sh [VERB] [ARGUMENTS]

  (none)                 build and install what this machine can: the package into .venv, and
                         the CUDA kernels and the TensorRT plugins into build/ where nvcc is
                         found
  demo [PROMPT] [ARGS]   generate text with the shipped model, with and without drafts;
                         ARGS go to `trtllm-treewy generate` (trtllm-treewy generate --help)
  test [ARGS]            run the tests; ARGS go to pytest, such as -k NAME or -m slow
  lint                   ruff, mypy, and shellcheck where installed
  check-tensorrt [ARGS]  build engines with the plugins by the tensorrt Python package of .venv, run
                         them on the GPU and compare; ARGS such as --steps 1000 --json FILE
  help                   this text

Every verb first installs what it needs; a second run finds it there.

Environment:
  TREEWY_PYTHON          the Python to make .venv with (3.10 to 3.13)
  TREEWY_TORCH_INDEX     package index to take torch from, or "none" for pip's own setting.
                         Unset, a machine without an NVIDIA GPU whose pip has no settings
                         takes the small CPU build, and any other what pip's settings give
  TREEWY_CUDA_ARCHS      GPU architectures to build the kernels for, as in "90 100"
  TENSORRT_ROOT          TensorRT's folder, for its headers; else the system's, else those in a
                         small wheel from PyPI
  pip's own variables and configuration files are respected
TEXT
}

say() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
die() {
    printf 'build.sh: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

# --- Python and the environment ------------------------------------------------------------

# Prints the first Python that pyproject.toml allows. A name on PATH may be a shim that does not
# run, so that each is tried.
find_python() {
    local candidate
    if [ -n "${TREEWY_PYTHON:-}" ]; then
        "$TREEWY_PYTHON" -c "$VERSION_TEST" 2>/dev/null ||
            die "TREEWY_PYTHON=$TREEWY_PYTHON does not run or is not Python 3.10 to 3.13"
        command -v "$TREEWY_PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c "$VERSION_TEST" >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10 to 3.13 found (looked for python3 and python3.10 to python3.13 on PATH)" \
        "Debian or Ubuntu: sudo apt-get install python3 python3-venv" \
        "Fedora: sudo dnf install python3" \
        "or say where one is: TREEWY_PYTHON=/path/to/python3 ./build.sh"
}

make_venv() {
    local python version
    if [ -e "$VENV" ] && ! compgen -G "$VENV/.in*" >/dev/null; then
        die ".venv exists, was not made by this script and is of no use to it" \
            "(no pip in it, or not Python 3.10 to 3.13); remove it and run this again"
    fi
    python="$(find_python)"
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    say "Making .venv with $python (Python $version)"
    rm -rf "$VENV"
    mkdir "$VENV"
    touch "$VENV/.incomplete"
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv "$VENV"
    elif "$python" -c 'import virtualenv' 2>/dev/null; then
        "$python" -m virtualenv --quiet "$VENV"
    else
        rm -rf "$VENV"
        die "$python cannot make a virtual environment: its ensurepip module is missing" \
            "Debian or Ubuntu: sudo apt-get install python$version-venv" \
            "or: $python -m pip install --user virtualenv" \
            "or use another Python: TREEWY_PYTHON=/path/to/python3 ./build.sh"
    fi
}

# Whether .venv is whole, runs, and is of the Python that was asked for.
venv_is_good() {
    [ -x "$PYTHON" ] && [ ! -e "$VENV/.incomplete" ] || return 1
    "$PYTHON" -c "$VERSION_TEST" 2>/dev/null && "$PYTHON" -c 'import pip' 2>/dev/null || return 1
    [ -n "${TREEWY_PYTHON:-}" ] || return 0
    local version='import sys; print(sys.version_info[:3], sys.base_prefix)'
    [ "$("$PYTHON" -c "$version")" = "$("$(find_python)" -c "$version")" ]
}

# What an installation depends on: the requirements, and where the code is (it is installed as
# links to this folder, so a moved checkout is installed again).
fingerprint() {
    { cat pyproject.toml; echo "$ROOT"; } | cksum
}

has_gpu() {
    [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] ||
        { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
}

pip_is_configured() {
    [ -n "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-}${PIP_NO_INDEX:-}" ] ||
        "$PYTHON" -m pip config list 2>/dev/null |
        grep -Eq '(index-url|extra-index-url|find-links|no-index)='
}

# Prints the index to take torch from; nothing where pip's own settings decide. From PyPI, torch
# on Linux brings several gigabytes of CUDA libraries, of no use without an NVIDIA GPU.
torch_index() {
    case "${TREEWY_TORCH_INDEX:-}" in
        none) return ;;
        ?*) echo "$TREEWY_TORCH_INDEX" && return ;;
    esac
    [ "$(uname -s)" = Linux ] || return 0
    if has_gpu || pip_is_configured; then return; fi
    if reachable "$TORCH_CPU_INDEX/torch/"; then
        echo "$TORCH_CPU_INDEX"
    else
        note "the index of CPU builds does not answer: torch comes with CUDA, a large download" >&2
    fi
}

reachable() {
    "$PYTHON" - "$1" 2>/dev/null <<'CODE'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
CODE
}

pip_install() {
    # Downloads take a while: on a terminal pip shows them, in a log it keeps quiet.
    local quiet=(--quiet)
    [ ! -t 1 ] || quiet=()
    "$PYTHON" -m pip install "${quiet[@]}" "$@"
}

install_torch_first() {
    local index requirement
    index="$(torch_index)"
    [ -n "$index" ] || return 0
    ! "$PYTHON" -c 'import torch' 2>/dev/null || return 0
    requirement="$(sed -n 's/^ *"\(torch[^"]*\)",.*/\1/p' pyproject.toml)"
    say "Installing torch from $index"
    pip_install --index-url "$index" "$requirement" ||
        note "that failed; going on with pip's default, which may be a larger download"
}

# install EXTRA: the package and its extra ("" for none), unless that is done already.
install() {
    local extra="$1" stamp="$VENV/.installed-${1:-base}" target="."
    [ -z "$extra" ] || target=".[$extra]"
    if venv_is_good && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
        return
    fi
    venv_is_good || make_venv
    # A killed installation leaves this mark, and the next run starts afresh.
    touch "$VENV/.incomplete"
    install_torch_first
    say "Installing trtllm-treewy${extra:+ with what \"$extra\" needs} into .venv"
    note "the first time this downloads torch and transformers"
    if ! pip_install --editable "$target"; then
        rm -f "$VENV/.incomplete" # pip ended by itself, and leaves no half-installed package
        die "installing failed, see pip's message above; run ./build.sh again to go on"
    fi
    "$PYTHON" -c 'import torch, transformers, trtllm_treewy' ||
        die "what was installed does not load, see above; run ./build.sh again to install afresh"
    fingerprint >"$stamp"
    rm -f "$VENV/.incomplete"
}

# Two runs at once must not install into one environment.
ensure() {
    mkdir -p .cache
    (
        trap 'exit 130' INT # a subshell starts without the traps
        ! command -v flock >/dev/null || flock 9
        for extra in "$@"; do install "$extra" 9>&-; done
    ) 9>.cache/install.lock
}

# --- verbs ---------------------------------------------------------------------------------

build() {
    ensure ""
    build_kernels
    build_plugin
    summary
}

# The CUDA kernels, where nvcc is found: for the GPU of this machine, else for the two that have
# the fast paths. TREEWY_CUDA_ARCHS names others.
build_kernels() {
    command -v "${NVCC:-nvcc}" >/dev/null || return 0
    local archs="${TREEWY_CUDA_ARCHS:-}"
    if [ -z "$archs" ] && command -v nvidia-smi >/dev/null; then
        archs="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
            tr -d '. ' | sort -u | tr '\n' ' ')" || archs=""
    fi
    archs="${archs:-90 100}"
    say "Building the CUDA kernels for ${archs% } (a minute or two for each)"
    TREEWY_CUDA_ARCHS="$archs" plugins/build_library.sh || kernels_failed="they did not compile, see above"
}
kernels_failed=""

# The TensorRT plugins, around the kernels; takes TensorRT's headers and nothing else of it.
build_plugin() {
    [ -z "$kernels_failed" ] && [ -e build/libtreewy.so ] && command -v "${NVCC:-nvcc}" >/dev/null ||
        return 0
    say "Building the TensorRT plugins"
    PYTHON="$PYTHON" plugins/build_plugin.sh || plugin_failed="see above"
}
plugin_failed=""

summary() {
    say "Built and installed"
    "$PYTHON" - <<'CODE'
import platform
from importlib.metadata import version

print(f"    trtllm-treewy {version('trtllm-treewy')} in .venv: Python {platform.python_version()}, "
      f"torch {version('torch')}, transformers {version('transformers')}")
print("    operators treewy::*: the torch reference, which runs on any device")
CODE
    [ -n "$kernels_failed" ] || [ ! -e build/libtreewy.so ] ||
        note "build/libtreewy.so: the CUDA kernels, which serve on a GPU"
    [ -n "$kernels_failed$plugin_failed" ] || [ ! -e build/libtreewy_tensorrt.so ] ||
        note "build/libtreewy_tensorrt.so: the TensorRT plugins (docs/plugin.md)"
    say "Left out"
    if [ -n "$kernels_failed" ]; then
        note "CUDA kernels: $kernels_failed"
    elif [ ! -e build/libtreewy.so ]; then
        note "CUDA kernels: no nvcc to compile them (CUDA 13); the torch reference serves"
    fi
    [ -z "$plugin_failed" ] || note "TensorRT plugins: $plugin_failed"
    note "Triton Inference Server: not a part of this; docs/triton.md says where to get it"
    if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        note "GPU: torch sees none on this machine, models run on the CPU"
    fi
    say "Next: ./build.sh demo, or .venv/bin/trtllm-treewy --help"
}

demo() {
    local prompt="When the connection is closed,"
    if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
        prompt="$1"
        shift
    fi
    [ "${1:-}" != "--" ] || shift
    # What shapes the drafts is for the first run alone; the rest is for both.
    local drafts=yes shape=() rest=()
    while [ $# -gt 0 ]; do
        case "$1" in
            --no-speculation) drafts=no ;;
            --draft-tree-widths | --draft-tree-parents | --dynamic-tree | --dynamic-tree-top-k | \
                --max-draft-len)
                shape+=("${@:1:2}")
                [ $# -eq 1 ] || shift
                ;;
            --draft-tree-widths=* | --draft-tree-parents=* | --dynamic-tree=* | \
                --dynamic-tree-top-k=* | --max-draft-len=*)
                shape+=("$1")
                ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
    ensure ""
    # float32, so that both runs give the same tokens and not only equally good ones.
    local generate=("$PYTHON" -m trtllm_treewy.cli generate "$MODEL" --prompt "$prompt"
        --dtype float32 --max-tokens 128 "${rest[@]}")
    if [ "$drafts" = no ]; then
        say "Without drafts"
        printf '%s' "$prompt"
        # Should both be given, the command says that they exclude each other.
        "${generate[@]}" --no-speculation "${shape[@]}"
        return
    fi
    say "With a draft tree: ${shape[*]:---draft-tree-widths 3,3,3, the default}"
    printf '%s' "$prompt"
    "${generate[@]}" "${shape[@]}"
    say "The same without drafts (text not shown)"
    "${generate[@]}" --no-speculation >/dev/null
    say "What to look at: the tokens a verification step"
    note "Times on a CPU are no measure of the method: there every node of a tree costs time,"
    note "where a GPU mostly reads weights and states, once for the whole tree."
}

run_tests() {
    ensure test
    "$PYTHON" -m pytest -o cache_dir=.cache/pytest "$@"
}

check_tensorrt() {
    ensure ""
    build_kernels
    build_plugin
    [ -z "$kernels_failed$plugin_failed" ] || die "what is to be checked was not built, see above"
    "$PYTHON" -c 'import tensorrt' 2>/dev/null ||
        die "the tensorrt package is not in .venv" \
            "for TensorRT-LLM 1.2.1: .venv/bin/python -m pip install 'tensorrt~=10.14.1'" \
            "for the latest: .venv/bin/python -m pip install tensorrt"
    "$PYTHON" tests/check_tensorrt.py "$@"
}

lint() {
    ensure dev
    local failed=()
    step ruff-check "$PYTHON" -m ruff check .
    step ruff-format "$PYTHON" -m ruff format --check .
    step mypy type_check
    if command -v shellcheck >/dev/null; then
        step shellcheck shellcheck -x build.sh .ci/run plugins/*.sh plugins/tests/*.sh \
            plugins/tests/tensorrt/*.sh
    else
        say "shellcheck: not installed, skipped"
    fi
    [ ${#failed[@]} -eq 0 ] || die "lint failed: ${failed[*]}"
    say "lint passed"
}

# step NAME COMMAND...: runs one check of lint and goes on after a failure.
step() {
    say "$1"
    if ! "${@:2}"; then failed+=("$1"); fi
}

# mypy over links that lie as the packages lie once installed; messages name the real files.
type_check() {
    local tree="$ROOT/.cache/typecheck/trtllm_treewy" status=0
    rm -rf "$tree"
    mkdir -p "$tree"
    ln -s "$ROOT"/trtllm_treewy/* "$ROOT/export" "$ROOT/runtime" "$tree/"
    (cd "$tree/.." && "$PYTHON" -m mypy --config-file "$ROOT/pyproject.toml" \
        --cache-dir "$ROOT/.cache/mypy") >"$ROOT/.cache/mypy.log" 2>&1 || status=$?
    sed -E 's#^trtllm_treewy/(export|runtime)/#\1/#' "$ROOT/.cache/mypy.log"
    return "$status"
}

no_arguments() {
    [ "$2" -eq 0 ] || {
        printf 'build.sh: %s takes no arguments\n\n' "$1" >&2
        usage >&2
        exit 2
    }
}

verb="${1:-build}"
[ $# -eq 0 ] || shift
case "$verb" in
    build)
        no_arguments build $#
        build
        ;;
    demo) demo "$@" ;;
    test) run_tests "$@" ;;
    check-tensorrt) check_tensorrt "$@" ;;
    lint)
        no_arguments lint $#
        lint
        ;;
    help | -h | --help) usage ;;
    *)
        printf 'build.sh: unknown verb: %s\n\n' "$verb" >&2
        usage >&2
        exit 2
        ;;
esac
