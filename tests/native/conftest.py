"""The library, with each level that was compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oddrank.native import Library, library


@pytest.fixture
def kernels() -> Iterator[Library]:
    """The library; the level in use is put back."""
    found = library()
    if found is None:
        pytest.skip("the package was installed without a C++ compiler")
    before = found.level
    yield found
    found.use(before)


@pytest.fixture(params=["scalar", "avx2", "avx512", "avx512bf16"])
def level(request: pytest.FixtureRequest, kernels: Library) -> str:
    """Each level in turn, in use."""
    if request.param not in kernels.runs:
        pytest.skip(f"this CPU does not run {request.param}")
    kernels.use(request.param)
    return str(request.param)
