"""Servers for the tests: the real process, and one in this process whose parts can be replaced."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from contextlib import contextmanager

ENGINE_FLAGS = ["--dtype", "float32", "--device", "cpu", "--draft-tree-widths", "2,2,2"]
ENGINE = {"dtype": "float32", "device": "cpu", "speculative_config": {"draft_tree_widths": [2] * 3}}


def until(condition, seconds=20.0):
    """Waits for something that another thread or process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


class ServerProcess:
    """`trtllm-treewy serve` on a free port of the loopback."""

    def __init__(self, model, *flags, key=None):
        environment = {k: v for k, v in os.environ.items() if k != "TREEWY_API_KEY"}
        if key is not None:
            environment["TREEWY_API_KEY"] = key
        command = [sys.executable, "-m", "trtllm_treewy.cli", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *ENGINE_FLAGS, *flags],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # A run in the background may ignore SIGINT, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.url, self.said = None, ""

    def wait_until_ready(self):
        for line in self.process.stderr:
            self.said += line
            found = re.search(r"serving \S+ on (http://\S+)\]", line)
            if found:
                self.url = found[1]
                return self
        raise AssertionError(f"the server ended: {self.said}")

    def stop(self, seconds=30):
        self.process.terminate()
        self.process.stderr.read()
        return self.process.wait(seconds)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


@contextmanager
def local_server(llm, **settings):
    """A server in a thread of this process; yields its URL, its `Service` and itself."""
    from trtllm_treewy.serve.server import ApiServer, listen, url_of
    from trtllm_treewy.serve.service import ServerSettings, Service

    service = Service(llm, ServerSettings(**{"model_name": "tiny", **settings}))
    ready = threading.Event()
    server = ApiServer(service, access_log=False, on_ready=ready.set)
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        try:
            assert ready.wait(20)
            yield types.SimpleNamespace(url=url_of(sock), service=service, server=server)
        finally:
            server.should_exit = True
            thread.join(30)
