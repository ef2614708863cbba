"""A real tritonserver with its Python backend, on the loopback, from the wheel of pytriton.

The wheel is for Linux on x86-64. Its Python backend (Triton 24.10) was built for numpy 1 and links
libpython, so that a Python with the shared library is needed, and one that numpy 1 is there for:
3.10 to 3.12. Both are downloaded once (55 and 18 MB) and kept in .cache/, without their
dependencies: the server's Python sees all packages of the tests' own, but for numpy.

By hand, on Triton's usual ports: python tests/triton_server.py MODELS [FLAGS OF TRITONSERVER]
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import venv
from contextlib import suppress
from pathlib import Path

from downloads import downloaded, unavailable
from serving import until

# gRPC's handlers for a fork only get in the way of the processes that other tests start.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

REQUIRED = "TREEWY_REQUIRE_TRITON"
PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SHARED_MEMORY = Path("/dev/shm")


def installed(repository):
    """Folder with the packages; skips, or fails in CI, where the server cannot run."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        unavailable(REQUIRED, "the wheel with tritonserver is for Linux on x86-64")
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        unavailable(REQUIRED, f"its Python backend needs numpy 1, which Python {PYTHON} has not")
    if libpython() is None:
        unavailable(REQUIRED, f"its Python backend needs libpython{PYTHON}.so.1.0")
    name = f"pytriton-0.7.0-cp{PYTHON.replace('.', '')}"
    return downloaded(repository / ".cache" / "triton" / name, PACKAGES, REQUIRED)


def libpython():
    """Folder of the shared library of this Python; None where there is none."""
    places = [sysconfig.get_config_var(name) for name in ("LIBDIR", "LIBPL")]
    places += [f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}", "/usr/lib", "/usr/lib64"]
    for place in filter(None, places):
        if Path(place, f"libpython{PYTHON}.so.1.0").is_file():
            return place
    return None


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class TritonServer:
    """tritonserver over `models`; `flags` are its own.

    Args:
        site: what `installed` gave.
        work: folder for the backend's files, the Python of the backend, and the log.
        models: the model repository.
        ports: for HTTP, gRPC and metrics; free ones by default.
        to_file: write the log to a file in `work`, and not to where this process writes.
    """

    def __init__(self, site, work, models, *flags, ports=None, to_file=True):
        work.mkdir(parents=True, exist_ok=True)
        self.log_file = work / "log.txt"
        self.shm_prefix = f"treewy_test_{os.getpid()}_{work.name}_"
        self.http, self.grpc, self.metrics_port = ports or free_ports(3)
        self.url = f"http://127.0.0.1:{self.http}"
        command = [
            str(_executable(site / "pytriton/tritonserver/bin/tritonserver", work)),
            f"--backend-directory={_backends(site, work)}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--model-repository={Path(models).resolve()}",
            *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            f"--metrics-port={self.metrics_port}",
            "--allow-gpu-metrics=false",
            "--metrics-interval-ms=200",
            *flags,
        ]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=work,
                env=_environment(site, work),
                stdin=subprocess.DEVNULL,
                stdout=log if to_file else None,
                stderr=log if to_file else None,
                start_new_session=True,
            )

    def wait_until_live(self, seconds=60):
        """Until requests are answered; models that are loaded at the start are there then."""

        def live():
            assert self.process.poll() is None, f"the server ended:\n{self.log()[-3000:]}"
            return self.get("/v2/health/live")[0] == 200

        until(live, seconds)
        return self

    def log(self):
        return self.log_file.read_text(errors="replace")

    def post(self, path, body=None, timeout=120):
        """(status, text) of a POST with a JSON body."""
        return self._ask(path, json.dumps({} if body is None else body).encode(), timeout)

    def get(self, path):
        return self._ask(path, None, 20)

    def _ask(self, path, data, timeout):
        try:
            with urllib.request.urlopen(f"{self.url}{path}", data, timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def load(self, model):
        return self.post(f"/v2/repository/models/{model}/load")

    def unload(self, model):
        return self.post(f"/v2/repository/models/{model}/unload")

    def ready(self, model):
        return self.get(f"/v2/models/{model}/ready")[0] == 200

    def metrics(self, model):
        """{(name, other labels...): value} of the metrics that carry `model`."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=20
        ) as answer:
            text = answer.read().decode()
        found = {}
        for name, inner, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', inner))
            if labels.pop("model", None) == model:
                labels.pop("version", None)
                found[(name, *(v for _, v in sorted(labels.items())))] = float(value)
        return found

    def processes(self):
        """Processes of the server's session that are still there."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = status.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(status.parent.name))
        return found

    def shared_memory(self):
        return sorted(SHARED_MEMORY.glob(f"{self.shm_prefix}*"))

    def stop(self, seconds=40):
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self):
        """Ends all there is of it, however it stands."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        for region in self.shared_memory():
            region.unlink(missing_ok=True)


def _backends(site, work):
    """The Python backend with the stub of this Python, as a folder that the server searches."""
    server = site / "pytriton" / "tritonserver"
    folder = work / "backends" / "python"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            shutil.copy(server / "backends" / "python" / name, folder)
        _executable(server / "python_backend_stubs" / PYTHON / "triton_python_backend_stub", folder)
    return folder.parent


def _executable(file, folder):
    """A copy that may be run: pip's --target leaves no such bit."""
    copy = folder / file.name
    if not copy.exists():
        shutil.copyfile(file, copy)
        copy.chmod(0o755)
    return copy


def _environment(site, work):
    """The stub takes its Python from PATH: an environment with numpy 1 before the tests' own."""
    environment = work / "python"
    if not environment.is_dir():
        venv.create(environment, with_pip=False)
        packages = environment / "lib" / f"python{PYTHON}" / "site-packages"
        lines = [str(site)]
        for place in filter(None, sys.path):
            if place.endswith(("site-packages", "dist-packages")):
                lines.append(f"import site; site.addsitedir({place!r})")
            elif Path(place).is_dir() and not place.startswith(sysconfig.get_path("stdlib")):
                lines.append(place)
        (packages / "tests.pth").write_text("\n".join(lines) + "\n")
    libraries = [str(site / "nvidia_pytriton.libs"), libpython()]
    return {
        **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")},
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(libraries),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def main(models, *flags):
    """Serves until Ctrl-C or SIGTERM."""

    def end(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    site = installed(Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory() as work:
        server = TritonServer(
            site, Path(work), models, *flags, ports=(8000, 8001, 8002), to_file=False
        )
        try:
            return server.process.wait()
        except KeyboardInterrupt:
            return server.stop()
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
