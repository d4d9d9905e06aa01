"""Does vLLM on GPUs say the same at an odd TP size? Run by hand, in vLLM's environment, on a machine that has them.

    python bench/vllm_gpu.py MODEL --tp 3 [--against 1] [--dtype auto]

Serves MODEL twice, with oddrank's plugin at --tp and without it at --against (a size that stock vLLM takes), and
compares greedy text and teacher-forced log-probabilities of the prompts. Exit 1 where the mean difference is above
--tolerance. Quantized kernels (fp8, NVFP4, MXFP4) run only on GPUs, so what `make test-vllm` shows of their parameters,
this shows of their results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = (
    "The three laws of thermodynamics can be stated as follows. First,",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
    "In 1905 Albert Einstein published four papers that changed physics. The first of them",
    "A recipe for bread: mix 500 g of flour with",
)


def serve(model: str, ranks: int, dtype: str, on: bool) -> list[dict[str, Any]]:
    """Text and prompt log-probabilities per prompt, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.json"
        command = [sys.executable, __file__, model, "--tp", str(ranks), "--dtype", dtype, "--child", str(out)]
        done = subprocess.run(command, env={**os.environ, "ODDRANK": "1" if on else "0"})
        if done.returncode:
            raise SystemExit(f"vLLM at TP={ranks} ended with {done.returncode}")
        answers: list[dict[str, Any]] = json.loads(out.read_text())
        return answers


def child(model: str, ranks: int, dtype: str, out: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, tensor_parallel_size=ranks, dtype=dtype, max_model_len=2048)
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=0))
    out.write_text(json.dumps([
        {
            "text": o.outputs[0].text,
            "logprobs": [
                position[token].logprob
                for token, position in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True)
            ],
        }
        for o in outputs
    ]))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--against", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tolerance", type=float, default=0.05, help="nats, mean over the prompts' tokens")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.model, given.tp, given.dtype, given.child)
        return 0
    stock = serve(given.model, given.against, given.dtype, on=False)
    ours = serve(given.model, given.tp, given.dtype, on=True)
    apart = [abs(a - b) for s, o in zip(stock, ours, strict=True)
             for a, b in zip(s["logprobs"], o["logprobs"], strict=True)]  # fmt: skip
    for prompt, s, o in zip(PROMPTS, stock, ours, strict=True):
        print(f"{'same text' if s['text'] == o['text'] else 'texts differ'}: {prompt!r}")
        print(f"  TP={given.against} stock:   {s['text'][:100]!r}\n  TP={given.tp} oddrank: {o['text'][:100]!r}")
    mean = statistics.mean(apart)
    print(f"prompt log-probabilities: mean difference {mean:.4f}, largest {max(apart):.4f} nats")
    return 0 if mean <= given.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
