"""The Python side of the CUDA library, without a GPU: structures, discovery, refusals."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from trtllm_treewy import cuda_library, cuda_ops
from trtllm_treewy import ops as ops  # registers torch.ops.treewy

STRUCTURES = {
    "treewy_tree": cuda_library.Tree,
    "treewy_stash": cuda_library.Stash,
    "treewy_state_pool": cuda_library.StatePool,
    "treewy_history": cuda_library.History,
    "treewy_conv_weights": cuda_library.ConvWeights,
    "treewy_packed": cuda_library.Packed,
    **{f"{name}_params": kind for name, kind in cuda_library.LAUNCHERS.items()},
}


def find_compiler(*names):
    for name in names:
        if shutil.which(name):
            return name
    pytest.skip(f"no C compiler ({', '.join(names)})")


def compile_and_run(source, tmp_path, repository, *, language="c"):
    """Output of a program over treewy.h."""
    compiler = find_compiler("gcc", "cc") if language == "c" else find_compiler("g++", "c++")
    path = tmp_path / f"program.{'c' if language == 'c' else 'cc'}"
    path.write_text(source)
    program = tmp_path / "program"
    include = repository / "plugins"
    subprocess.run([compiler, f"-I{include}", str(path), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def layout(tmp_path_factory, repository):
    """Sizes and offsets as the C compiler has them, and the header's constants."""
    lines = ['#include "include/treewy.h"', "#include <stdio.h>", "int main(void) {"]
    for name, kind in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in kind._fields_:
            what = f"{name}.{field}"
            lines.append(
                f'printf("{what} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name}*)0)->{field}));"
            )
    constants = (
        "TREEWY_VERSION TREEWY_MAX_NODES TREEWY_MAX_HEAD_DIM TREEWY_MAX_CONV_WIDTH TREEWY_OK "
        "TREEWY_INVALID_ARGUMENT TREEWY_UNSUPPORTED TREEWY_CUDA_ERROR TREEWY_FLOAT32 "
        "TREEWY_BFLOAT16 TREEWY_FLOAT16"
    )
    lines += [f'printf("{name} %d\\n", (int){name});' for name in constants.split()]
    lines += ["return 0; }"]
    output = compile_and_run("\n".join(lines), tmp_path_factory.mktemp("layout"), repository)
    return {name: list(map(int, rest)) for name, *rest in map(str.split, output.splitlines())}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_mirror_the_header(layout, name):
    kind = STRUCTURES[name]
    assert layout[name] == [ctypes.sizeof(kind)]
    for field, *_ in kind._fields_:
        there = getattr(kind, field)
        assert layout[f"{name}.{field}"] == [there.offset, there.size], field


def test_constants_mirror_the_header(layout):
    for name, value in {
        "TREEWY_VERSION": cuda_library.VERSION,
        "TREEWY_MAX_NODES": cuda_library.MAX_NODES,
        "TREEWY_MAX_HEAD_DIM": cuda_library.MAX_HEAD_DIM,
        "TREEWY_MAX_CONV_WIDTH": cuda_library.MAX_CONV_WIDTH,
        "TREEWY_OK": cuda_library.OK,
        "TREEWY_INVALID_ARGUMENT": cuda_library.INVALID_ARGUMENT,
        "TREEWY_UNSUPPORTED": cuda_library.UNSUPPORTED,
        "TREEWY_CUDA_ERROR": cuda_library.CUDA_ERROR,
        "TREEWY_FLOAT32": cuda_library.FLOAT32,
        "TREEWY_BFLOAT16": cuda_library.BFLOAT16,
        "TREEWY_FLOAT16": cuda_library.FLOAT16,
    }.items():
        assert layout[name] == [value], name


def test_every_structure_and_launcher_of_the_header_is_known(repository):
    header = (repository / "plugins" / "include" / "treewy.h").read_text()
    for name in STRUCTURES:
        assert f"}} {name};" in header
    assert header.count("typedef struct") == len(STRUCTURES)
    assert header.count("TREEWY_API treewy_status ") == len(cuda_library.LAUNCHERS)


def test_shared_memory_of_verify_is_what_the_kernel_takes(tmp_path, repository):
    shapes = [
        (key_dim, nodes, entries, input_bytes, state_bytes)
        for key_dim in (64, 128, 256)
        for nodes in (1, 16, 17, 100, 128)
        for entries in (0, 1, 16, 64)
        for input_bytes in (2, 4)
        for state_bytes in (2, 4)
    ]
    lines = ['#include "kernels/tree_verify_plan.h"', "#include <cstdio>", "int main() {"]
    for key_dim, nodes, entries, input_bytes, state_bytes in shapes:
        terms = 3 if 4 in (input_bytes, state_bytes) else 2
        values = f"{key_dim}, 64, {nodes}, {entries}, {input_bytes}, {state_bytes}, {terms}"
        lines.append(f'std::printf("%d\\n", treewy::verify_layout({{{values}}}, 64, 1).total);')
    output = compile_and_run("\n".join([*lines, "}"]), tmp_path, repository, language="c++")
    assert [cuda_ops.verify_shared_bytes(*shape) for shape in shapes] == [
        int(line) for line in output.split()
    ]


# ------------------------------------------------------------------ finding and loading


def test_the_variable_names_the_file(monkeypatch, tmp_path):
    path = tmp_path / "other.so"
    path.touch()
    monkeypatch.setenv("TREEWY_LIBRARY", str(path))
    assert cuda_library.find_library() == path


def test_a_variable_that_names_no_file_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEWY_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(FileNotFoundError, match=r"TREEWY_LIBRARY names .*missing\.so"):
        cuda_library.find_library()


def test_none_does_without_the_library(monkeypatch):
    monkeypatch.setenv("TREEWY_LIBRARY", "none")
    assert cuda_library.find_library() is None
    assert not cuda_ops.register()


def test_the_build_folder_comes_before_the_package(monkeypatch, tmp_path):
    monkeypatch.delenv("TREEWY_LIBRARY", raising=False)
    package = tmp_path / "trtllm_treewy"
    package.mkdir()
    monkeypatch.setattr(cuda_library, "__file__", str(package / "cuda_library.py"))
    assert cuda_library.find_library() is None
    (package / "libtreewy.so").touch()
    assert cuda_library.find_library() == package / "libtreewy.so"
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "libtreewy.so").touch()
    assert cuda_library.find_library() == tmp_path / "build" / "libtreewy.so"


def test_loading_without_a_library_says_what_to_do(monkeypatch):
    monkeypatch.setenv("TREEWY_LIBRARY", "none")
    with pytest.raises(RuntimeError, match=r"there is no libtreewy\.so: run \./build\.sh"):
        cuda_library.load_library.__wrapped__()


def shared_library(tmp_path, source):
    compiler = find_compiler("gcc", "cc")
    code, path = tmp_path / "library.c", tmp_path / "libtreewy.so"
    code.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", str(code), "-o", str(path)], check=True)
    return path


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libtreewy.so"
    path.write_text("not a library")
    with pytest.raises(RuntimeError, match=r"libtreewy\.so is not a usable treewy library"):
        cuda_library.CudaLibrary(path)


def test_another_library_is_refused(tmp_path):
    path = shared_library(tmp_path, "int other(void) { return 1; }")
    with pytest.raises(RuntimeError, match="not a usable treewy library.*treewy_version"):
        cuda_library.CudaLibrary(path)


def test_another_version_is_refused(tmp_path):
    path = shared_library(tmp_path, "int treewy_version(void) { return 999; }")
    wanted = rf"version 999, expected {cuda_library.VERSION}: .* Run \./build\.sh"
    with pytest.raises(RuntimeError, match=wanted):
        cuda_library.CudaLibrary(path)


def test_a_library_without_a_launcher_is_refused(tmp_path):
    path = shared_library(
        tmp_path,
        f"int treewy_version(void) {{ return {cuda_library.VERSION}; }}\n"
        'const char* treewy_last_error(void) { return ""; }',
    )
    with pytest.raises(RuntimeError, match="lacks treewy_tree_verify"):
        cuda_library.CudaLibrary(path)


@pytest.fixture
def failing_library(tmp_path):
    """A library whose launchers return the status that their structure starts with."""
    launchers = "\n".join(
        f"int {name}(const int* params, void* stream) {{ return params ? *params : 1; }}"
        for name in cuda_library.LAUNCHERS
    )
    path = shared_library(
        tmp_path,
        f"int treewy_version(void) {{ return {cuda_library.VERSION}; }}\n"
        'const char* treewy_last_error(void) { return "commit: too many cooks"; }\n' + launchers,
    )
    return cuda_library.CudaLibrary(path)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (cuda_library.INVALID_ARGUMENT, ValueError),
        (cuda_library.UNSUPPORTED, ValueError),
        (cuda_library.CUDA_ERROR, RuntimeError),
    ],
)
def test_a_status_becomes_an_error_with_the_librarys_text(failing_library, status, error):
    value = ctypes.c_int32(status)
    got = failing_library.launchers["treewy_commit"](ctypes.addressof(value), None)
    assert got == status
    with pytest.raises(error, match="treewy::commit: too many cooks"):
        failing_library.check(got)


def test_ok_is_no_error(failing_library):
    failing_library.check(cuda_library.OK)


# ------------------------------------------------------------------ what goes to the reference


def state(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"state": state(3, 2, 64, 64)}, None),
        ({"state": state(2, 3, 2, 8, 256, dtype=torch.bfloat16)}, None),
        ({"state": state(3, 2, 64, 64, dtype=torch.float64)}, "state in torch.float64"),
        ({"state": state(3, 2, 64, 64, dtype=torch.float16)}, "state in torch.float16"),
        ({"state": state(3, 2, 5, 8)}, "head dims K = 8, V = 5"),
        ({"state": state(3, 2, 8, 7)}, "head dims K = 7, V = 8"),
        ({"state": state(3, 2, 8, 264)}, "head dims K = 264, V = 8"),
        ({"state": state(3, 2, 8, 16)[..., :8]}, "state that is not contiguous within a slot"),
        ({"state": state(3, 4, 8, 8)[:, ::2]}, "state that is not contiguous within a slot"),
        ({"state": state(65)[1:].view(1, 1, 8, 8)}, "state that is not at 16-byte addresses"),
        ({"inputs": (state(1), state(1).double())}, "activations in torch.float32, torch.float64"),
        ({"inputs": (state(1), state(1).half())}, "activations in torch.float16, torch.float32"),
        ({"gates": (state(1).double(),)}, "gates in torch.float64"),
        ({"conv": (state(1), state(1).half())}, "conv inputs in torch.float16, torch.float32"),
        ({"conv": (state(4), state(8)[::2])}, "conv state with strided channels"),
        ({"float32": (None, state(1))}, None),
        ({"float32": (state(1).double(),)}, "parameters, stash or history not in float32"),
        ({"nodes": 128}, None),
        ({"nodes": 129}, "more than 128 nodes"),
        ({"width": 8}, None),
        ({"width": 9}, "conv width 9"),
        ({"width": 1}, "conv width 1"),
    ],
)  # fmt: skip
def test_the_rule_for_the_reference(given, reason):
    assert cuda_ops.reason_for_reference(**given) == reason


def test_every_operator_with_a_kernel_exists():
    for name in cuda_ops.KERNELS:
        assert hasattr(torch.ops.treewy, name)


def test_kernels_take_what_their_operators_take():
    import inspect

    for name, kernel in cuda_ops.KERNELS.items():
        operator = getattr(ops, name)._init_fn
        assert list(inspect.signature(kernel).parameters) == list(
            inspect.signature(operator).parameters
        )


def test_errors_without_a_counter_are_none():
    assert cuda_ops.error_count("cpu") == 0
