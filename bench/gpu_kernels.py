"""The Triton kernels on one GPU, and decoding with and without CUDA graphs. Prints one line a figure, then JSON.

Where there is no GPU it says so. Weights are rotated over at least 512 MB, or twice the GPU's cache, so none comes from
it. A kernel's time is the GPU's own (CUDA events around a pass over all matrices, captured in a graph, so that the host
is not in it), the median of several passes; shares are of the rate at which this GPU copies memory, measured in the
same run, bytes read and written counted. Takes minutes: kernels are compiled and their tiles chosen first.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from kernels import CHOSEN, EXPERTS, FORMATS, HIDDEN, WIDTH, K, N, form_of, stored
from report import row

from oddrank.checkpoint import Checkpoint
from oddrank.planner import make_plan
from oddrank.runtime.engine import Engine
from oddrank.runtime.parallel import SoloGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.request import Sampling
from oddrank.runtime.worker import load_rank
from oddrank.synth.release import describe_release
from oddrank.synth.write import write_checkpoint

ROTATED = 512 << 20
PASSES = 9
BATCHES = (1, 8, 16)
PREFILL = 512
DECODED, SEQUENCES = 128, (1, 8)
QUANTIZED = {name: form for name, form in FORMATS.items() if name != "bf16"}

Work = Callable[[], object]


def seconds(work: Work) -> float:
    """The GPU's time for one pass, captured; the median of several."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for turn in range(PASSES + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn > 1:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copies() -> float:
    """Bytes a second that a copy within the GPU's memory reads and writes."""
    source = torch.empty(ROTATED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * ROTATED / seconds(lambda: target.copy_(source))


def rotated() -> int:
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
    return max(ROTATED, 2 * int(cache))


def matrices(name: str) -> tuple[list[Callable[[torch.Tensor], torch.Tensor]], int]:
    """Products with enough matrices of one form, and the bytes of each."""
    from oddrank.gpu import linear_for

    kind = form_of(name, K)
    one = stored(kind, N, K)
    each = sum(part.nbytes for part in one.values())
    made: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for _ in range(-(-rotated() // each)):
        parts = {suffix: part.cuda() for suffix, part in one.items()}
        if name == "bf16":
            weight = parts[kind.values]
            made.append(lambda x, w=weight: F.linear(x, w))
            continue
        linear = linear_for(kind, parts)
        assert linear is not None
        made.append(linear)
    return made, each


def products(speed: float) -> list[dict[str, Any]]:
    rows, prefill = [], {}
    for name in FORMATS:
        made, each = matrices(name)
        for m in BATCHES:
            x = torch.randn(m, K, device="cuda").bfloat16()
            rate = each * len(made) / seconds(lambda x=x, made=made: [one(x) for one in made])
            what = f"matrix {N} x {K} times {m} rows of x, {name}" + (" (cuBLAS)" if name == "bf16" else "")
            rows.append(row(what, rate / 1e9, "GB/s", None, None, "copying memory", speed / 1e9))
        x = torch.randn(PREFILL, K, device="cuda").bfloat16()
        prefill[name] = 2 * PREFILL * N * K * len(made) / seconds(lambda x=x, made=made: [one(x) for one in made])
    for name, rate in prefill.items():
        ceiling = ("cuBLAS in bf16", prefill["bf16"] / 1e12)
        what = f"matrix {N} x {K} times {PREFILL} rows of x, {name}"
        rows.append(row(what, rate / 1e12, "TFLOP/s", None, None, *ceiling))
    return rows


def experts(speed: float) -> list[dict[str, Any]]:
    from oddrank.gpu import experts_for

    rows = []
    for name in FORMATS:
        forms, shapes = [form_of(name, k) for k in (HIDDEN, WIDTH)], ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        banks = [stored(form, *shape, leading=(EXPERTS, 1)) for form, shape in zip(forms, shapes, strict=True)]
        banks = [{suffix: part.cuda() for suffix, part in bank.items()} for bank in banks]
        layer = experts_for((forms[0], banks[0]), (forms[1], banks[1]), F.silu)
        assert layer is not None
        nbytes = sum(part.nbytes for bank in banks for part in bank.values())
        order = torch.randperm(EXPERTS, device="cuda")
        ids = [order[i : i + CHOSEN].reshape(1, -1) for i in range(0, EXPERTS, CHOSEN)]
        x, weights = torch.randn(1, HIDDEN, device="cuda").bfloat16(), torch.full((1, CHOSEN), 1 / CHOSEN).cuda()
        rate = nbytes / seconds(lambda ids=ids, layer=layer, x=x, w=weights: [layer(x, w, each) for each in ids])
        what = f"{CHOSEN} of {EXPERTS} experts, {HIDDEN} x {WIDTH}, {name}, a token: active bytes"
        rows.append(row(what, rate / 1e9, "GB/s", None, None, "copying memory", speed / 1e9))
    return rows


def decoding(folder: Path) -> list[dict[str, Any]]:
    """Tokens a second of a small model, each step launched by the host, and replayed."""
    rows = []
    for family, form in (("qwen3_5", "bf16"), ("qwen3_5_moe", "nvfp4-ct")):
        path = write_checkpoint(describe_release(family, form, size="tiny"), folder / f"{family}-{form}")
        with Checkpoint.open(path) as checkpoint:
            plan, group = make_plan(path, 1).plan, SoloGroup("cuda")
            model = load_rank(plan, checkpoint, group, Precision.of("bf16", "cuda"))[0]
        for n in SEQUENCES:
            speeds = {}
            for how, record in (("launched by the host", False), ("replayed", True)):
                engine = Engine(model, slots=n, record=record)
                prompts = [[(7 * i + j) % 512 for j in range(32)] for i in range(n)]
                for tokens in (8, DECODED):  # the first warms up
                    engine.generate(prompts, Sampling(max_tokens=tokens, ignore_eos=True))
                speeds[how] = engine.timings.tokens_per_second
                what = f"tiny {family} {form}, {n} sequences, {how}"
                rows.append(row(what, speeds[how], "tokens/s", None))
    return rows


def main() -> int:
    if not torch.cuda.is_available():
        print(f"gpu_kernels: skipped, torch {torch.__version__} sees no CUDA GPU")
        return 0
    start = time.perf_counter()
    speed = copies()
    rows = [row("copying memory", speed / 1e9, "GB/s", None), *products(speed), *experts(speed)]
    with tempfile.TemporaryDirectory() as folder:
        rows += decoding(Path(folder))
    for each in rows:
        share = f"  {each['share']:6.1%} of {each['ceiling_is']}" if each["share"] else ""
        print(f"{each['what']:<72} {each['measured']:10.1f} {each['unit']}{share}")
    properties = torch.cuda.get_device_properties(0)
    report = {"gpu": properties.name, "seconds": round(time.perf_counter() - start, 1), "rows": rows}
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
