"""Finding the library, choosing its level, its threads."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from native.words import Case, sample

from oddrank.native import Library, compiled, library, native_matrix
from oddrank.native.compiled import CHOICE


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The library is looked for anew in the test, and again after it."""
    library.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.cache_clear()


def test_levels(kernels: Library) -> None:
    assert kernels.levels[0] == "scalar" and kernels.runs[0] == "scalar"
    assert set(kernels.runs) <= set(kernels.levels)
    if platform.machine() == "x86_64":
        assert kernels.levels == ["scalar", "avx2", "avx512", "avx512bf16"]
    with pytest.raises(ValueError, match="sse9"):
        kernels.use("sse9")


def test_without_a_library(fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; then torch computes."""
    fresh.setattr("oddrank.native.compiled._FILE", tmp_path / "_kernels.so")
    with caplog.at_level(logging.WARNING):
        assert library() is None and library() is None
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    made = sample(Case("nvfp4"), 4, 32)
    assert native_matrix(made.decoder, made.stored) is None
    (tmp_path / "_kernels.so").write_bytes(b"no library")
    library.cache_clear()
    assert library() is None


def test_a_library_of_other_sources_is_not_used(
    fresh: pytest.MonkeyPatch, kernels: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After an update without an installation: arguments would be read as what they are not."""
    native = Path(compiled.__file__).parent
    for path in native.iterdir():
        if path.suffix in (".cpp", ".h", ".so"):
            shutil.copy(path, tmp_path)
    fresh.setattr("oddrank.native.compiled._FILE", tmp_path / "_kernels.so")
    assert library() is not None
    with (tmp_path / "delta.cpp").open("a") as file:
        file.write("// changed\n")
    library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "other sources" in caplog.text
    for path in tmp_path.glob("*.[ch]*"):  # installed without its sources
        path.unlink()
    library.cache_clear()
    assert library() is not None


def test_choice(fresh: pytest.MonkeyPatch, kernels: Library) -> None:
    fresh.setenv(CHOICE, "torch")
    library.cache_clear()
    assert library() is None
    fresh.setenv(CHOICE, "scalar")
    library.cache_clear()
    found = library()
    assert found is not None and found.level == "scalar"


def test_several_callers_at_once(kernels: Library) -> None:
    """One has the library's threads, the others compute alone; all get the same bits."""
    made = sample(Case("mxfp4"), 200, 512)
    matrix = native_matrix(made.decoder, made.stored)
    assert matrix is not None
    x = torch.randn(3, 512)
    want, wrong = matrix.linear(x), []

    def work() -> None:
        for _ in range(100):
            if not torch.equal(matrix.linear(x, threads=2), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork(kernels: Library) -> None:
    """A child has none of its parent's threads and starts its own."""
    made = sample(Case("nvfp4"), 200, 512)
    matrix = native_matrix(made.decoder, made.stored)
    assert matrix is not None
    x = torch.randn(1, 512)
    want = matrix.linear(x, threads=2)
    child = os.fork()
    if not child:
        signal.alarm(20)
        same = all(torch.equal(matrix.linear(x, threads=2), want) for _ in range(20))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
