"""On a real GPU: kernels at real sizes against float64, replayed graphs against eager steps, whole models against the
CPU, and two ranks over NCCL where there are two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from native.words import CASES, Case, sample
from runtime.quantized.hybrids import distance
from stream.releases import checkpoint
from torch import Tensor

from oddrank.planner import make_plan
from oddrank.runtime.engine import Engine
from oddrank.runtime.loader import prepare
from oddrank.runtime.models import Llama
from oddrank.runtime.models.llama import full_logits
from oddrank.runtime.parallel import SoloGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.request import Sampling
from oddrank.runtime.worker import load_rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]

TYPES = [torch.bfloat16, torch.float16, torch.float32]
LAST = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TOKENS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(5)).tolist()
RELEASES = [("qwen3_5", f) for f in ("bf16", "fp8-block", "nvfp4-ct", "mxfp4")]
RELEASES += [("qwen3_5_moe", f) for f in ("bf16", "fp8-block", "nvfp4-ct", "mxfp4")]
RELEASES += [
    ("qwen3_5", "gptq"),
    ("qwen2", "gptq-int8"),
    ("llama", "int8"),
    ("qwen3", "mxfp8"),
    ("qwen3_5_moe", "awq"),
    ("qwen3_5_moe", "int4-ct"),
]


def on_gpu(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {suffix: part.cuda() for suffix, part in stored.items()}


def wrong(got: Tensor, x: Tensor, numbers: Tensor) -> float:
    """The largest error over what sums in fp32 may bring, tensor cores' cutting off included, and the last rounding."""
    a = x.double()
    want = a @ numbers.t()
    bound = a.abs() @ numbers.abs().t() * (numbers.shape[1] / 8 + 16) * 2.0**-23 + want.abs() * LAST[x.dtype] + 1e-300
    return float(((got.double() - want).abs() / bound).max())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, dtype: torch.dtype) -> None:
    from oddrank.gpu import linear_for

    made = sample(case, 1500, 2144)
    stored, numbers = on_gpu(made.stored), torch.from_numpy(made.numbers).cuda()
    linear = linear_for(made.decoder, stored)
    assert linear is not None
    for m in (1, 2, 16, 17, 64, 300):
        x = torch.randn(m, 2144, generator=torch.Generator().manual_seed(m)).to(dtype).cuda()
        got = linear(x)
        assert wrong(got, x, numbers) < 1, m
        assert torch.equal(linear(x), got)  # whichever tiles were chosen meanwhile
        assert not got[:, 0].any()
        if m <= 16:
            assert torch.equal(linear(x[:1]), got[:1])


NAN = [
    (Case("fp8-channel"), ".weight", 0x7F),
    (Case("nvfp4"), ".weight_scale", 0xFF),
    (Case("mxfp4"), ".weight_scale", 0xFF),
]


@pytest.mark.parametrize(("case", "suffix", "code"), NAN, ids=str)
def test_codes_of_nan(case: Case, suffix: str, code: int) -> None:
    from oddrank.gpu import linear_for

    made = sample(case, 140, 288)
    made.stored[suffix].view(torch.uint8)[3, -1] = code
    linear = linear_for(made.decoder, on_gpu(made.stored))
    assert linear is not None
    hit = torch.arange(140, device="cuda") == 3
    for m in (1, 40):
        for dtype in TYPES:
            got = linear(torch.full((m, 288), 0.01, dtype=dtype, device="cuda"))
            assert torch.equal(got.isnan(), hit.expand(m, 140))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_powers_at_the_ends(dtype: torch.dtype) -> None:
    """Subnormal numbers are not taken for zero."""
    from oddrank.gpu import linear_for

    stored = {
        ".weight": torch.full((2, 64), 0x22, dtype=torch.uint8),
        ".weight_scale": torch.tensor([[0] * 4, [254] * 4], dtype=torch.uint8),
    }
    linear = linear_for(Case("mxfp4").decoder(), on_gpu(stored))
    assert linear is not None
    for m in (1, 40):
        assert (linear(torch.full((m, 128), 2.0**10, dtype=dtype, device="cuda"))[:, 0] == 2.0**-110).all()
        assert (linear(torch.full((m, 128), 2.0**-10, dtype=dtype, device="cuda"))[:, 1] == 2.0**124).all()


@pytest.mark.parametrize("tokens", [1, 4, 300])
@pytest.mark.parametrize(
    "case",
    [CASES[0], Case("fp8-block", (128, 128)), Case("nvfp4"), Case("mxfp4"), Case("int4-rows", (1, 32))],
    ids=str,
)
def test_experts(case: Case, tokens: int) -> None:
    from oddrank.gpu import experts_for

    experts, hidden, width, k = 16, 1024, 320, 4
    upper = [sample(case, 2 * width, hidden, seed=e) for e in range(experts)]
    lower = [sample(case, hidden, width, seed=100 + e) for e in range(experts)]
    banks = [
        on_gpu({s: torch.stack([one.stored[s] for one in bank])[:, None].contiguous() for s in bank[0].stored})
        for bank in (upper, lower)
    ]
    layer = experts_for((upper[0].decoder, banks[0]), (lower[0].decoder, banks[1]), F.silu)
    assert layer is not None
    draw = torch.Generator().manual_seed(tokens)
    dtype = torch.bfloat16
    x = (torch.randn(tokens, hidden, generator=draw) * 0.001).to(dtype).cuda()
    ids = torch.stack([torch.randperm(experts, generator=draw)[:k] for _ in range(tokens)]).cuda()
    weights = torch.rand(tokens, k, generator=draw).cuda()
    want, size = (torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda") for _ in range(2))
    for e in range(experts):
        both, down = torch.from_numpy(upper[e].numbers).cuda(), torch.from_numpy(lower[e].numbers).cuda()
        gate, up = (x.double() @ both.t()).chunk(2, -1)
        between, share = F.silu(gate) * up, (weights * (ids == e)).sum(-1, keepdim=True).double()
        want += share * (between @ down.t())
        size += share * (between.abs() @ down.abs().t())
    got = layer(x, weights, ids)
    assert ((got.double() - want).abs() <= size * 2.0**-7 + want.abs() * 2.0**-8).all()
    assert torch.equal(layer(x, weights, ids), got)
    # no question to the host: it can be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, weights, ids)
    x.mul_(0.5)
    graph.replay()
    assert torch.equal(out, layer(x, weights, ids))


def loaded(family: str, form: str, dtype: str, device: str) -> Llama:
    source = checkpoint(family, form)
    plan = make_plan(source.path, 1).plan
    return load_rank(plan, source, SoloGroup(device), Precision.of(dtype, device))[0]


def continued(model: Llama, record: bool) -> tuple[list[list[int]], Engine]:
    prompts = [TOKENS[:9], TOKENS[3:20], TOKENS[5:11]]
    engine = Engine(model, slots=4, record=record)
    done = engine.generate(prompts, Sampling(max_tokens=24, ignore_eos=True))
    return [one.token_ids for one in done], engine


@pytest.mark.parametrize(("family", "form"), RELEASES)
def test_models(family: str, form: str) -> None:
    """In fp32 the CPU's logits and, captured or not, its tokens; in bf16 its logits as far as bf16 goes."""
    with torch.inference_mode():
        want = full_logits(loaded(family, form, "fp64", "cpu"), TOKENS)
        for dtype, near in (("fp32", 1e-3), ("bf16", 0.1)):
            model = loaded(family, form, dtype, "cuda")
            prepare(model)
            assert distance(full_logits(model, TOKENS).double().cpu(), want) < near
    model = loaded(family, form, "fp32", "cuda")
    eager, _ = continued(model, record=False)
    captured, engine = continued(model, record=True)
    steps: Any = engine.steps
    assert steps.recording and steps.replayed >= 20
    assert captured == eager


@pytest.mark.parametrize(("family", "form"), [("qwen3_5", "nvfp4-ct"), ("qwen3_5_moe", "fp8-block")])
def test_replayed_steps_are_the_eager_ones(family: str, form: str) -> None:
    """In bf16, step by step, from the same cache."""
    from oddrank.gpu.graphs import GraphSteps
    from oddrank.runtime.step import Step

    with torch.inference_mode():
        model = loaded(family, form, "bf16", "cuda")
        prepare(model)
        prompts = [TOKENS[:9], TOKENS[3:20], TOKENS[5:11]]
        caches = []
        for _ in range(2):
            caches.append(model.new_cache(4))
            model(Step.of([(i, p, 0) for i, p in enumerate(prompts)], "cuda"), caches[-1])
        replayed, eager = GraphSteps(model), GraphSteps(model, record=False)
        for turn in range(8):
            past = [len(p) + turn for p in prompts]
            got = replayed([7, 8, 9], past, caches[0])
            want = eager([7, 8, 9], past, caches[1])
            assert distance(got.double().cpu(), want.double().cpu()) < 0.05  # other shapes, other sums
        assert replayed.replayed == 7


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two CUDA GPUs")
@pytest.mark.parametrize(("family", "form"), [("qwen3_5", "bf16"), ("qwen3_5_moe", "nvfp4-ct")])
def test_two_ranks_over_nccl(family: str, form: str) -> None:
    from oddrank.runtime.generate import Session

    path, found = checkpoint(family, form).path, []
    for tp in (1, 2):
        with Session(path, make_plan(path, tp).plan, dtype="fp32", device="cuda") as session:
            done, _ = session.generate([TOKENS[:9], TOKENS[3:20]], Sampling(max_tokens=16, ignore_eos=True))
            logits = session.logits(TOKENS)
        found.append(([one.token_ids for one in done], logits))
    assert found[0][0] == found[1][0]
    assert distance(found[1][1].double(), found[0][1].double()) < 1e-4
