"""Builds the kernels of oddrank.native where there is a C++ compiler. Without one, or where it fails, the package is
installed all the same and computes with torch alone. Everything else is in pyproject.toml."""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/oddrank/native")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno"]
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
"""gcc 12 warns of its own AVX-512 header."""
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
LEVELS = {
    "level_avx2": AVX2,
    "level_avx512": AVX512,
    "level_avx512bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi"],
    "operations_avx2": AVX2,
    "operations_avx512": AVX512,
}
"""Files compiled for CPUs with more features than every CPU has; which is used is decided where it runs."""


def digest_of_sources() -> str:
    """As oddrank.native.compiled computes it when it loads the library."""
    digest = hashlib.sha256()
    for path in sorted(p for p in SOURCES.iterdir() if p.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class BuildKernels(build_ext):
    """A library for ctypes, not a Python module: each file has flags of its own, and the name tells no Python."""

    def build_extension(self, ext: Extension) -> None:
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects, digest = [], f'-DODDRANK_SOURCES="{digest_of_sources()}"'
        for source in ext.sources:
            flags = [*FLAGS, *QUIET, digest, *(LEVELS.get(Path(source).stem, []) if x86 else [])]
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=ext.depends
            )
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"], target_lang="c++")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


setup(
    ext_modules=[
        Extension(
            "oddrank.native._kernels",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
