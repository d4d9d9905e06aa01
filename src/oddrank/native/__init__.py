"""Products with stored matrices on the CPU, in C++: compiled when the package is installed, where there is a compiler.

`library()` is None where there is none, and everything is computed by torch.
"""

from oddrank.native.compiled import Library, library
from oddrank.native.matrix import NativeMatrix, native_matrix

__all__ = ["Library", "NativeMatrix", "library", "native_matrix"]
