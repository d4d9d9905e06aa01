"""The compiled CPU kernels beside other libraries' on the same shapes. Prints JSON.

Matrix-vector of 4096 x 4096: ours, torch's (oneDNN bf16, packed fp16, int8 and int4 weights, which is what torchao
calls on a CPU) and ggml's (from llama-cpp-python, or from the folder named by GGML_LIBRARIES). A layer's experts of the
35B-A3B's geometry: ours and kt-kernel's. All threads, weights rotated over at least 256 MB, bytes counted with their
scales. Every round times each once; rates are the best round's, gains medians over rounds of ratios within one. What is
not installed is left out, and named.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from kernels import CHOSEN, EXPERTS, HIDDEN, ROTATED, WIDTH, K, Layer, N, Rotation, loaded, seconds
from report import row

from oddrank.native import library
from oddrank.runtime.topology.limits import cores_available

ROUNDS = 7
Work = tuple[int, Callable[[], object]]
GGML_LIBRARIES = "GGML_LIBRARIES"
KT = {
    "fp8 block": (8, 128, ("AMXFP8_MOE", "AVX2FP8_MOE")),
    "NVFP4": (4, 16, ("AVX2MXFP4_MOE",)),
    "MXFP4": (4, 32, ("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE")),
}
"""kt-kernel's names: bits, the elements of a scale along K, kernels. Those called AMX use AVX-512 where there is no
AMX."""
GGML = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30, "MXFP4": 39}
"""ggml.h's numbers of its types."""


def rotated(nbytes: int, make: Callable[[], Callable[[], object]]) -> Work:
    """As many of one matrix as there must be, and what multiplies by each once."""
    works = [make() for _ in range(max(2, -(-ROTATED // nbytes)))]
    return nbytes * len(works), lambda: [work() for work in works]


def of_torch() -> dict[str, Work]:
    """torch's own products with narrow weights. Those that this build lacks are left out."""
    wide = torch.randn(N, K).mul_(0.02)
    x, half = torch.randn(1, K), torch.randn(1, K).bfloat16()

    def bf16() -> Callable[[], object]:
        weight = loaded(wide.bfloat16())
        return lambda: F.linear(half, weight)

    def fp16() -> Callable[[], object]:
        packed = torch.ops.quantized.linear_prepack_fp16(wide, None)
        return lambda: torch.ops.quantized.linear_dynamic_fp16(x, packed)

    def int8() -> Callable[[], object]:
        weight, scales = loaded(wide.mul(500).to(torch.int8)), torch.ones(N).bfloat16()
        return lambda: torch._weight_int8pack_mm(half, weight, scales)

    def int4() -> Callable[[], object]:
        codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        scales = torch.ones(K // 32, N, 2).bfloat16()
        return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(half, packed, 32, scales)

    made = {}
    for name, nbytes, make in (
        ("torch bf16", 2 * N * K, bf16),
        ("torch packed fp16", 2 * N * K, fp16),
        ("torch int8", N * K, int8),
        ("torch int4, groups of 32", N * K // 2 + N * K // 8, int4),
    ):
        try:
            make()()
        except (RuntimeError, AttributeError, NotImplementedError):
            continue
        made[name] = rotated(nbytes, make)
    return made


class _Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _libraries() -> list[ctypes.CDLL] | None:
    folder = os.environ.get(GGML_LIBRARIES)
    if folder is None:
        spec = importlib.util.find_spec("llama_cpp")
        folder = None if spec is None or spec.origin is None else str(Path(spec.origin).parent / "lib")
    if folder is None:
        return None
    found = []
    for name in ("base", "cpu"):
        files = sorted(glob.glob(f"{folder}/libggml-{name}.so*"))
        if not files:
            return None
        found.append(ctypes.CDLL(files[0], mode=ctypes.RTLD_GLOBAL))
    return found


def _repacking(base: ctypes.CDLL, cpu: ctypes.CDLL) -> int | None:
    """ggml's kind of buffer that lays out rows of Q4_0 for several at a time, as llama.cpp loads them. None where this
    CPU has no kernel for that."""
    if not cpu.ggml_cpu_has_avx2():
        return None
    pointer = ctypes.c_void_p
    cpu.ggml_backend_cpu_reg.restype = pointer
    for name, restype, arguments in (
        ("reg_dev_get", pointer, (pointer, ctypes.c_size_t)),
        ("reg_get_proc_address", pointer, (pointer, ctypes.c_char_p)),
        ("buft_name", ctypes.c_char_p, (pointer,)),
        ("alloc_ctx_tensors_from_buft", pointer, (pointer, pointer)),
        ("tensor_set", None, (pointer, pointer, ctypes.c_size_t, ctypes.c_size_t)),
    ):
        function = getattr(base, f"ggml_backend_{name}")
        function.restype, function.argtypes = restype, arguments
    registry = cpu.ggml_backend_cpu_reg()
    address = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(base.ggml_backend_reg_dev_get(registry, 0))
    while kinds[0]:
        if base.ggml_backend_buft_name(kinds[0]) == b"CPU_REPACK":
            return int(kinds[0])
        kinds = ctypes.cast(ctypes.addressof(kinds.contents) + ctypes.sizeof(pointer), ctypes.POINTER(pointer))
    return None


def of_ggml(threads: int) -> dict[str, Work]:
    """One graph of products with every matrix: its threads are started once for all of them."""
    libraries = _libraries()
    if libraries is None:
        return {}
    base, cpu = libraries
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    base.ggml_init.restype, base.ggml_init.argtypes = pointer, (_Init,)
    for name, arguments in {
        "new_tensor_2d": (pointer, ctypes.c_int, long, long),
        "mul_mat": (pointer, pointer, pointer),
        "new_graph": (pointer,),
        "get_data": (pointer,),
    }.items():
        function = getattr(base, f"ggml_{name}")
        function.restype, function.argtypes = pointer, arguments
    base.ggml_build_forward_expand.argtypes = (pointer, pointer)
    base.ggml_nbytes.restype, base.ggml_nbytes.argtypes = ctypes.c_size_t, (pointer,)
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = (ctypes.c_int, pointer, pointer, long, long, long, pointer)
    cpu.ggml_cpu_init()
    compute = cpu.ggml_graph_compute_with_ctx
    compute.argtypes = (pointer, pointer, ctypes.c_int)
    repacked = _repacking(base, cpu)
    wide, x = torch.randn(N, K).mul_(0.02), torch.randn(K)
    narrow = wide.bfloat16()
    made: dict[str, Work] = {}
    for name, kind in GGML.items():
        one = base.ggml_init(_Init(1 << 27, None, False))
        sample = base.ggml_new_tensor_2d(one, kind, K, N)
        nbytes = base.ggml_nbytes(sample)
        if name == "BF16":
            ctypes.memmove(base.ggml_get_data(sample), narrow.data_ptr(), nbytes)
        else:
            base.ggml_quantize_chunk(kind, wide.data_ptr(), base.ggml_get_data(sample), 0, N, K, None)
        count = max(2, -(-ROTATED // nbytes))
        context = base.ggml_init(_Init(count * (nbytes + (1 << 16)) + (1 << 26), None, False))
        graph = base.ggml_new_graph(context)
        vector = base.ggml_new_tensor_2d(context, 0, K, 1)
        ctypes.memmove(base.ggml_get_data(vector), x.data_ptr(), 4 * K)
        for _ in range(count):
            matrix = base.ggml_new_tensor_2d(context, kind, K, N)
            ctypes.memmove(base.ggml_get_data(matrix), base.ggml_get_data(sample), nbytes)
            base.ggml_build_forward_expand(graph, base.ggml_mul_mat(context, matrix, vector))
        made[f"ggml {name}"] = nbytes * count, lambda c=context, g=graph: compute(c, g, threads)
        if name != "Q4_0" or repacked is None:
            continue
        held = base.ggml_init(_Init(1 << 20, None, True))
        matrices = [base.ggml_new_tensor_2d(held, kind, K, N) for _ in range(count)]
        base.ggml_backend_alloc_ctx_tensors_from_buft(held, repacked)
        graph = base.ggml_new_graph(context)
        for matrix in matrices:
            base.ggml_backend_tensor_set(matrix, base.ggml_get_data(sample), 0, nbytes)
            base.ggml_build_forward_expand(graph, base.ggml_mul_mat(context, matrix, vector))
        made["ggml Q4_0, repacked"] = nbytes * count, lambda c=context, g=graph: compute(c, g, threads)
    return made


def _module(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_kt(threads: int) -> dict[str, Work]:
    """kt-kernel's experts, with every kernel that it has for a format, through the extension that it chooses for this
    CPU: the package itself asks for one build of torch."""
    spec = importlib.util.find_spec("kt_kernel")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent
    variant = _module("kt_cpu_detect", folder / "_cpu_detect.py").detect_cpu_features()
    files = sorted(folder.glob(f"_kt_kernel_ext_{variant}.*.so"))
    if not files:
        return {}
    kt = _module("kt_kernel_ext", files[0])
    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
    infer = kt.CPUInfer(pool)
    mask, map_ = torch.zeros(EXPERTS, dtype=torch.uint8), torch.arange(EXPERTS)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    x, out = torch.randn(1, HIDDEN).bfloat16(), torch.empty(1, HIDDEN).bfloat16()
    weights, size = torch.full((1, CHOSEN), 1 / CHOSEN), torch.ones(1, dtype=torch.int32)
    made: dict[str, Work] = {}
    for name, kind in [(name, kind) for name, (_, _, kinds) in KT.items() for kind in kinds]:
        bits, group, _ = KT[name]
        if not hasattr(kt.moe, kind):
            continue
        config = kt.moe.MOEConfig(EXPERTS, CHOSEN, HIDDEN, WIDTH, mask.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, infer.backend_, 64
        config.quant_config.bits, config.quant_config.group_size = bits, group
        config.quant_config.zero_point = False
        kept: list[list[torch.Tensor]] = []
        nbytes = 0
        for part, (n, k) in shapes.items():
            values = [torch.randint(0, 120, (n, k * bits // 8), dtype=torch.uint8) for _ in range(EXPERTS)]
            if bits == 8:
                scales = [torch.full((n // 128, k // 128), 0.01) for _ in range(EXPERTS)]
            else:
                scales = [torch.full((n, k // group), 0.01).bfloat16() for _ in range(EXPERTS)]
            kept += [values, scales]
            nbytes += n * k * bits // 8 + (n * k // 128**2 * 4 if bits == 8 else n * k // group)
            setattr(config, f"{part}_projs", [[t.data_ptr() for t in values]])
            setattr(config, f"{part}_scales", [[t.data_ptr() for t in scales]])
        moe = getattr(kt.moe, kind)(config)
        infer.submit(moe.load_weights_task(map_.data_ptr()))
        infer.sync()
        order = torch.randperm(EXPERTS)
        ids = [order[i : i + CHOSEN].reshape(1, -1).contiguous() for i in range(0, EXPERTS, CHOSEN)]

        def run(moe: Any = moe, ids: list[torch.Tensor] = ids, kept: object = kept) -> None:
            for chosen in ids:
                pointers = chosen.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr()
                infer.submit(moe.forward_task(size.data_ptr(), CHOSEN, *pointers, False))
                infer.sync()

        made[f"kt-kernel experts, {name}, {kind}"] = nbytes * EXPERTS, run
    return made


Q4 = "ggml Q4_0", "ggml Q4_0, repacked", "ggml Q4_1"
PAIRS: dict[str, tuple[str, ...]] = {
    "bf16": ("torch bf16", "torch packed fp16", "ggml BF16"),
    "fp8 block": ("torch int8", "ggml Q8_0"),
    "NVFP4": ("torch int4, groups of 32", *Q4),
    "MXFP4": ("torch int4, groups of 32", *Q4, "ggml MXFP4"),
} | {
    f"experts, {name}": tuple(f"kt-kernel experts, {name}, {kernel}" for kernel in kernels)
    for name, (_, _, kernels) in KT.items()
}
"""Ours, and what it is set beside: bytes a second for each."""
TARGETS = {(ours, theirs): 0.9 for ours in ("NVFP4", "MXFP4") for theirs in Q4}


def main() -> int:
    load = round(os.getloadavg()[0], 2)
    threads = cores_available()
    if library() is None:
        print(json.dumps({"load": load, "failed": "the compiled kernels are missing"}))
        return 1
    torch.set_num_threads(threads)
    x = torch.randn(1, K)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries greet on standard output, and take their leave there
    works: dict[str, Work] = {}
    for name in ("bf16", "fp8 block", "NVFP4", "MXFP4"):
        matrices = Rotation(name, threads)
        works[name] = matrices.nbytes, lambda m=matrices: m.run(x)
    for name in ("fp8 block", "NVFP4", "MXFP4"):
        layer = Layer(name, threads)
        works[f"experts, {name}"] = layer.nbytes, layer.run
    works |= of_torch() | of_ggml(threads) | of_kt(threads)
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, (nbytes, work) in works.items():
            time.sleep(0.1)  # whose threads had work last may spin for 50 ms, on cores that are wanted
            work()  # a thread that slept is often woken on the core of its waker, and moved milliseconds later
            wall, _ = seconds(work)
            if turn:  # the first warms up
                times[name].append(wall / nbytes)
    rows = [row(f"{name}: weights read", 1e-9 / min(taken), "GB/s", None) for name, taken in times.items()]
    missing = []
    for ours, others in PAIRS.items():
        for theirs in others:
            if theirs not in times:
                missing.append(theirs)
                continue
            gain = statistics.median(b / a for a, b in zip(times[ours], times[theirs], strict=True))
            least = TARGETS.get((ours, theirs), 1.0 if theirs.startswith("kt") else None)
            target = None if least is None else f">= {least} x"
            what = f"{ours} against {theirs}: bytes a second"
            rows.append(row(what, gain, "x", None if least is None else gain >= least, target))
    report = {"load": load, "threads": threads, "missing": sorted({*missing}), "rows": rows}
    print(json.dumps(report, indent=2), file=out, flush=True)
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
