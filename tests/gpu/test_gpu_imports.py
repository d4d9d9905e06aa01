"""The runtime without Triton and the libraries for GPUs."""

from __future__ import annotations

import subprocess
import sys

REFUSED = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "fla", "flashinfer"):
            raise ImportError(f"no {name}")
sys.meta_path.insert(0, Refuse())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REFUSED + code], capture_output=True, text=True, timeout=120)


def test_the_runtime_needs_none_of_them() -> None:
    ended = run(
        "import oddrank.runtime as package\n"
        "for found in pkgutil.walk_packages(package.__path__, 'oddrank.runtime.'):\n"
        "    importlib.import_module(found.name)\n"
        "print([name for name in sys.modules if name.startswith('oddrank.gpu')])\n"
    )
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr


def test_without_triton_torch_decodes_and_one_line_says_so() -> None:
    ended = run(
        "import logging, torch\n"
        "logging.basicConfig(format='%(message)s')\n"
        "import oddrank.gpu, oddrank.gpu.graphs, oddrank.gpu.attention, oddrank.gpu.delta\n"
        "from oddrank.runtime.formats import decoder\n"
        "form = decoder('nvfp4')\n"
        "for _ in range(2):\n"
        "    assert oddrank.gpu.linear_for(form, {}) is None\n"
        "    assert oddrank.gpu.experts_for((form, {}), (form, {}), torch.nn.functional.silu) is None\n"
        "assert oddrank.gpu.attention.flashinfer() is None and oddrank.gpu.delta.library() is None\n"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines() == [
        "Triton is missing, torch decodes stored weights on the GPU instead, more slowly (no triton)"
    ]
