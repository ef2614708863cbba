import importlib.machinery
import json
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trtllm_treewy import cuda_library, doctor, tensorrt_package

NAMES = [
    "Python",
    "torch",
    "CUDA devices",
    "nvcc",
    "TensorRT Python package",
    "TensorRT library",
    "TensorRT-LLM",
    "ONNX Runtime",
    "Triton client",
    "Triton server",
    "Triton compiler",
    "CUDA kernels",
    "TensorRT plugins",
    "transformers",
]


LIBRARIES = {
    "CUDA kernels": cuda_library.LIBRARY_VARIABLE,
    "TensorRT plugins": tensorrt_package.LIBRARY_VARIABLE,
}


def check(name):
    return next(item for item in doctor.collect() if item["name"] == name)


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """A machine on which nothing is installed."""
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **kwargs: None)
    monkeypatch.setattr(doctor.os, "access", lambda *args: False)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    for variable in LIBRARIES.values():
        monkeypatch.setenv(variable, str(tmp_path / "none.so"))


@pytest.fixture
def installed(monkeypatch):
    """Pretends that packages are installed: `installed(name="1.2")`."""

    def pretend(**versions):
        def find_spec(name):
            return importlib.machinery.ModuleSpec(name, None, origin="x") if name in names else None

        def version(distribution):
            if distribution not in versions:
                raise doctor.metadata.PackageNotFoundError(distribution)
            return versions[distribution]

        names = {name.partition("-")[0] for name in versions}
        monkeypatch.setattr(doctor.util, "find_spec", find_spec)
        monkeypatch.setattr(doctor.metadata, "version", version)

    return pretend


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_this_machine():
    import torch
    import transformers

    checks = doctor.collect()
    assert [item["name"] for item in checks] == NAMES
    assert json.loads(json.dumps(checks)) == checks
    assert all(item["meaning"] for item in checks)
    # A wheel's local version, such as +cu130, may stand in only one of the two.
    assert torch.__version__.split("+")[0] in check("torch")["detail"]
    assert check("CUDA devices")["found"] == torch.cuda.is_available()
    assert check("transformers")["detail"] == transformers.__version__


def test_report_has_every_finding():
    checks = doctor.collect()
    text = doctor.report(checks)
    assert text == doctor.report()
    for item in checks:
        assert item["name"] in text
        assert item["meaning"] in text
    assert doctor.report([]) == ""


def test_empty_machine(nothing):
    found = {item["name"]: item["found"] for item in doctor.collect()}
    assert found == {name: name == "Python" for name in NAMES}
    assert "reference operators in torch serve" in check("CUDA kernels")["meaning"]
    for name in LIBRARIES:
        assert "none.so" in check(name)["detail"]


def test_a_check_that_raises_becomes_a_finding(monkeypatch):
    monkeypatch.setattr(
        doctor, "_import_torch", lambda: (_ for _ in ()).throw(OSError("no libc10"))
    )
    broken = check("torch")
    assert not broken["found"]
    assert broken["detail"] == "OSError: no libc10"
    assert "not usable" in broken["meaning"]
    assert check("transformers")["found"]


def test_an_error_without_text_is_told_by_its_type(monkeypatch):
    monkeypatch.setattr(doctor, "_import_torch", lambda: (_ for _ in ()).throw(RuntimeError()))
    assert check("torch")["detail"].startswith("RuntimeError")


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from trtllm_treewy import cuda_library, doctor; doctor.collect();"
        "print([m for m in ('transformers', 'tensorrt', 'tensorrt_llm', 'tritonclient')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cuda_devices(monkeypatch):
    device = SimpleNamespace(name="Test GPU", major=9, minor=0, total_memory=141 * 1024**3)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: device,
    )
    fake = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setattr(doctor, "_import_torch", lambda: fake)
    expected = "Test GPU (compute capability 9.0, 141 GiB)"
    assert check("CUDA devices")["detail"] == f"{expected}; {expected}"
    assert "built for CUDA 13.0" in check("torch")["detail"]


def test_nvcc_from_cuda_home(monkeypatch, tmp_path):
    path = program(
        tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.9, V12.9.1'"
    )
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **kwargs: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert check("nvcc")["detail"] == f"12.9, {path}"


@pytest.mark.parametrize("text", ["exit 3", "exec sleep 60"])
def test_nvcc_that_fails_or_hangs(monkeypatch, tmp_path, text):
    path = program(tmp_path / "nvcc", text)
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **kwargs: str(path))
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.5)
    finding = doctor._guarded("nvcc", doctor._nvcc)
    assert not finding["found"]
    assert "Error" in finding["detail"] or "TimeoutExpired" in finding["detail"]


@pytest.mark.parametrize("distribution", ["tensorrt", "tensorrt-cu12", "tensorrt-cu13"])
def test_tensorrt_package(installed, distribution):
    installed(**{distribution: "10.14.1"})
    assert check("TensorRT Python package") | {"meaning": ""} == {
        "name": "TensorRT Python package",
        "found": True,
        "detail": "10.14.1",
        "meaning": "",
    }


def test_package_without_metadata(monkeypatch, installed):
    installed(tensorrt="1")
    monkeypatch.setattr(
        doctor.metadata,
        "version",
        lambda name: (_ for _ in ()).throw(doctor.metadata.PackageNotFoundError(name)),
    )
    assert check("TensorRT Python package")["detail"] == "unknown version"


def test_a_folder_with_the_name_of_a_package_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "tensorrt_llm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not check("TensorRT-LLM")["found"]


def test_tensorrt_library(monkeypatch, tmp_path):
    name = "libnvinfer.so.10"
    (tmp_path / "libnvinfer.so.10.14.1").write_bytes(b"")
    (tmp_path / name).symlink_to("libnvinfer.so.10.14.1")
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda _: name)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert check("TensorRT library")["detail"] == str(tmp_path / "libnvinfer.so.10.14.1")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    monkeypatch.setattr(doctor.shutil, "which", lambda *args, **kwargs: None)
    assert doctor._tensorrt_library()["detail"] == name


def test_triton(installed, monkeypatch, tmp_path):
    installed(tritonclient="2.61")
    path = program(tmp_path / "tritonserver", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check("Triton client")["detail"] == "2.61"
    assert check("Triton server")["detail"] == str(path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("CUDA kernels", cuda_library.LIBRARY_NAME),
        ("TensorRT plugins", tensorrt_package.LIBRARY),
    ],
)
def test_libraries_from_the_environment(monkeypatch, tmp_path, name, file):
    library = tmp_path / file
    monkeypatch.setenv(LIBRARIES[name], str(library))
    assert not check(name)["found"]
    library.write_bytes(b"")
    for named in (library, tmp_path):  # the file, or the folder it is in
        monkeypatch.setenv(LIBRARIES[name], str(named))
        assert check(name)["found"]
        assert check(name)["detail"] == str(library)


def test_kernels_in_the_usual_places(monkeypatch):
    monkeypatch.delenv(cuda_library.LIBRARY_VARIABLE, raising=False)
    assert all(path.name == cuda_library.LIBRARY_NAME for path in cuda_library.library_candidates())
    assert (
        cuda_library.LIBRARY_VARIABLE in check("CUDA kernels")["meaning"]
        or check("CUDA kernels")["found"]
    )
