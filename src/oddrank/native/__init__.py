"""Products with stored matrices on the CPU, in C++: compiled when the package is installed, where there is a compiler.

`library()` is None where there is none, and everything is computed by torch.
"""

from oddrank.native.compiled import Library, library
from oddrank.native.experts import NativeExperts, native_experts
from oddrank.native.matrix import NativeMatrix, NativeStack, native_linear, native_matrix

__all__ = [
    "Library",
    "NativeExperts",
    "NativeMatrix",
    "NativeStack",
    "library",
    "native_experts",
    "native_linear",
    "native_matrix",
]
