"""What every test gets: no network, seeded random numbers, GPU tests only where there is a GPU."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

# Before anything imports transformers: the tests never look for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("TREEWY_DEBUG", None)
# The tensors are small: on a busy machine a second thread costs ten times what it brings.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers at every run; a test may seed again."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shipped_model() -> Path:
    """Directory of the trained model in the repository."""
    return ROOT / "examples" / "treewy-tiny"


@pytest.fixture(scope="session")
def ask_header(tmp_path_factory):
    """Of a header of plugins/, evaluates C++ expressions of namespace treewy, all integers."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def asker(header):
        folder = tmp_path_factory.mktemp("asked")

        def evaluate(*expressions):
            source, program = folder / "ask.cc", folder / "ask"
            prints = "".join(f'std::printf("%d\\n", int({e}));\n' for e in expressions)
            source.write_text(
                f'#include <cstdio>\n#include "{header}"\nusing namespace treewy;\n'
                f"int main() {{\n{prints}}}\n"
            )
            subprocess.run(
                ["g++", "-std=c++17", "-I", ROOT / "plugins", source, "-o", program], check=True
            )
            output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
            return [int(line) for line in output.split()]

        return evaluate

    return asker
