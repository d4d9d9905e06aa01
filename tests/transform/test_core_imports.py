"""The core plans without torch, and dependencies point one way."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from layout.shapes import config, tensor_table
from safetensors.numpy import save_file

import oddrank

ROOT = Path(oddrank.__file__).parent
CORE = ("errors", "checkpoint", "geometry", "formats", "families", "layout", "transform", "planner", "report")
COMMANDS = ("cli", "cli.plan", "cli.pad", "cli.options", "cli.tables")


def modules(*names: str) -> list[str]:
    """The named modules of oddrank with everything below them."""
    found = []
    for name in names:
        module = importlib.import_module(f"oddrank.{name}")
        found.append(module.__name__)
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
            found.append(info.name)
    return sorted(set(found))


def core() -> list[str]:
    return modules(*CORE) + [f"oddrank.{c}" for c in COMMANDS]


def run(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env, timeout=120, check=False
    )


HEAVY = ("torch", "transformers", "tokenizers", "vllm")


def test_importing_the_core_imports_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = run(code, *core())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    c = config("llama", q=9, kv=3, head_dim=8, mlp=60, vocab=96)
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(c))
    save_file({n: np.zeros(t.shape, np.float16) for n, t in tensor_table(c).items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "MODEL", "--tp", "2", "--json"],
        ["plan", "MODEL", "--tp", "1-5"],
        ["plan", "MODEL", "--tp", "4", "--executor", "vllm", "--layout", "pad"],
        ["pad", "MODEL", "OUT", "--tp", "2"],
        ["--help"],
        ["plan", "--help"],
        ["plan", "MODEL/nowhere", "--tp", "2"],
    ],
)
def test_commands_that_need_no_torch_import_none(argv: list[str], model_dir: Path) -> None:
    code = (
        "import sys\n"
        "from oddrank.cli import main\n"
        "sys.argv[0] = 'oddrank'\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    out = str(model_dir.parent / "out")
    done = run(code, *(a.replace("MODEL", str(model_dir)).replace("OUT", out) for a in argv))
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in argv:
        report = json.loads(done.stdout[: done.stdout.rindex("HEAVY")])
        assert report["tp"] == 2 and report["proof"]["ok"]


def test_a_plan_of_numpy_only() -> None:
    """The core's own install: no torch on the path at all."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {HEAVY!r}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import importlib\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print('fine')"
    )
    done = run(code, *core())
    assert done.stdout.strip() == "fine", done.stderr


# -- direction ---------------------------------------------------------------------------------------------------

# a package may import those before it in the flow; never those after
ALLOWED = {
    "errors": set(),
    "words": set(),
    "checkpoint": {"errors", "words"},
    "geometry": {"errors"},
    "formats": {"errors", "checkpoint", "geometry"},
    "families": {"errors", "checkpoint", "geometry", "formats"},
    "layout": {"errors", "checkpoint", "geometry", "formats", "families"},
    "transform": {"errors", "checkpoint", "geometry", "formats", "families", "layout"},
    "planner": {"errors", "checkpoint", "geometry", "formats", "families", "layout", "transform"},
    "report": {"errors", "checkpoint", "geometry", "formats", "families", "layout", "transform", "planner"},
}


def imports(path: Path, package: str) -> set[str]:
    """Modules a source file imports anywhere, also inside functions; relative ones resolved."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def _sources(name: str) -> list[tuple[Path, str]]:
    path = ROOT / name
    if path.is_dir():
        return [(p, ".".join(("oddrank", *p.relative_to(ROOT).parent.parts))) for p in sorted(path.rglob("*.py"))]
    return [(path.with_suffix(".py"), "oddrank")]


@pytest.mark.parametrize("part", ALLOWED)
def test_dependencies_point_one_way(part: str) -> None:
    sources = _sources(part)
    assert sources
    for path, package in sources:
        for name in imports(path, package):
            root, _, rest = name.partition(".")
            assert root not in HEAVY, f"{path.relative_to(ROOT)} imports {name}"
            if root != "oddrank" or not rest:
                continue
            target = rest.split(".")[0]
            if target == "__version__":
                continue
            assert target == part or target in ALLOWED[part], f"{path.relative_to(ROOT)} imports {name}"


def test_geometry_knows_no_file_and_no_plan() -> None:
    for path, package in _sources("geometry"):
        for name in imports(path, package):
            assert not name.startswith(("oddrank.checkpoint", "oddrank.layout", "os", "pathlib", "safetensors"))


def test_nothing_of_the_core_is_left_out_of_the_direction() -> None:
    """A new top-level module must be given its place."""
    beside = {
        "cli",
        "runtime",
        "server",
        "gpu",
        "verify",
        "demo",
        "engines",
        "native",
        "bench",
        "synth",
        "picture",
        "known",
    }
    beside |= {"__init__", "__main__"}
    known = {*ALLOWED, *beside}
    there = {p.stem if p.is_file() else p.name for p in ROOT.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert there - {"__pycache__", "py"} <= known


def test_the_walk_sees_imports_of_every_kind(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        "import a.b as c\nfrom d import e\ndef f():\n    from .g import h\n    from .. import i\n    import torch\n"
    )
    found = imports(source, "oddrank.layout")
    assert {"a.b", "d", "d.e", "oddrank.layout.g", "oddrank.layout.g.h", "oddrank", "oddrank.i", "torch"} <= found
