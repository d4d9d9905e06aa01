"""Tests of the GPU kernels: most need no GPU (the interpreter, the compiler); those marked `gpu` do."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]  # see test_gpu_interpreted.py
