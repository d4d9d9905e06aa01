"""SmolLM2-135M decoding: bf16 against transformers' generate, four bits against llama.cpp. Prints JSON.

All are in this process and take turns, greedy, from the same prompt, with the same threads; a rate is the tokens after
the first over the time they took. llama.cpp (through llama-cpp-python) runs the Q4_1 file that the demo's model is made
from. For oddrank the same weights are rounded to NVFP4, the head among them, as llama.cpp has its own in Q4_1. What is
not installed is skipped, and a line says so. Ceilings are the bytes of the weights over what this machine reads per
second.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import PROMPT, bandwidth, ours, theirs
from engines import engine
from report import row

from oddrank.checkpoint import Checkpoint, by_alignment
from oddrank.checkpoint.dtypes import nbytes
from oddrank.checkpoint.writer import Entry, header_bytes
from oddrank.demo.smollm2 import DEFAULT_OUT, ensure_model, fetch_gguf
from oddrank.native import library
from oddrank.runtime.topology.limits import cores_available
from oddrank.synth.numbers import from_bf16
from oddrank.synth.schemes import NVFP4

TOKENS, ROUNDS = 64, 5
AGAINST_TRANSFORMERS, AGAINST_LLAMA_CPP = 2.5, 1.0
HEAD = "lm_head.weight"


def quantize(model: Path, out: Path) -> int:
    """A bf16 llama checkpoint with its linear layers and its head rounded to NVFP4, as ModelOpt stores them. Returns
    the bytes that a token reads."""
    out.mkdir()
    words: dict[str, tuple[Entry, bytes]] = {}

    def put(name: str, dtype: str, shape: tuple[int, ...], values: Any) -> None:
        words[name] = (name, dtype, shape), np.ascontiguousarray(values).tobytes()

    with Checkpoint.open(model) as checkpoint:
        for name, info in checkpoint.tensors.items():
            stored = checkpoint.array(name)
            table = name == "model.embed_tokens.weight"
            if table or len(info.shape) != 2:
                put(name, info.dtype, info.shape, stored)
            if table or len(info.shape) == 2:
                numbers = from_bf16(stored)
                limit = float(np.abs(numbers).max())
                base = (HEAD if table else name).removesuffix(".weight")
                constants = NVFP4.constants(*info.shape, limit)
                made = zip(NVFP4.parts(*info.shape), NVFP4.encode(numbers, limit), constants, strict=True)
                for part, encoded, constant in made:
                    if part.suffix != ".input_scale":
                        put(base + part.suffix, part.dtype, part.shape, constant if encoded is None else encoded)
        config = dict(checkpoint.config)
    listed = by_alignment([entry for entry, _ in words.values()])
    with open(out / "model.safetensors", "wb") as file:
        file.write(header_bytes(listed, {"format": "pt"}))
        for name, _, _ in listed:
            file.write(words[name][1])
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], "producer": {"name": "modelopt"}}
    config |= {"tie_word_embeddings": False, "quantization_config": said}
    (out / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, out / name)
    return sum(nbytes(dtype, shape) for name, dtype, shape in listed if "embed_tokens" not in name)


class LlamaCpp:
    """llama.cpp on a GGUF file; `rate` is tokens per second."""

    def __init__(self, file: Path, threads: int) -> None:
        from llama_cpp import Llama

        self.model = Llama(
            str(file), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False
        )

    def continued(self, tokens: int) -> list[int]:
        """The greedy continuation, and in `seconds` how long all but its first token took."""
        self.model.reset()
        found: list[int] = []
        self.seconds = 0.0
        new = list(PROMPT)
        for _ in range(tokens):
            start = time.perf_counter()
            self.model.eval(new)
            logits = np.ctypeslib.as_array(self.model._ctx.get_logits_ith(-1), (self.model.n_vocab(),))
            new = [int(logits.argmax())]
            if found:
                self.seconds += time.perf_counter() - start
            found += new
        return found

    def rate(self) -> float:
        self.continued(TOKENS)
        return (TOKENS - 1) / self.seconds


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> int:
    load, threads = round(os.getloadavg()[0], 2), cores_available()
    if library() is None:
        print(json.dumps({"load": load, "failed": "the compiled kernels are missing"}))
        return 1
    torch.set_num_threads(threads)
    model = Path(__file__).resolve().parents[1] / DEFAULT_OUT
    ensure_model(model)
    skipped = []
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
        four = Path(scratch) / "nvfp4"
        four_bytes = quantize(model, four)
        whole, quantized = engine(model), engine(four)
        rates: dict[str, Callable[[], float]] = {
            "bf16": lambda: ours(whole, TOKENS),
            "NVFP4": lambda: ours(quantized, TOKENS),
        }
        if installed("transformers"):
            from transformers import AutoModelForCausalLM

            other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
            other.generation_config.eos_token_id = None
            rates["transformers"] = lambda: theirs(other, TOKENS)
        else:
            skipped.append("transformers is not installed: pip install transformers")
        if installed("llama_cpp"):
            cpp = LlamaCpp(fetch_gguf(Path(scratch)), threads)
            rates["llama.cpp"] = cpp.rate
        else:
            skipped.append("llama-cpp-python is not installed: pip install -e '.[bench]' (it compiles for minutes)")
        with Checkpoint.open(model) as checkpoint:
            weights = sum(info.end - info.start for info in checkpoint.tensors.values())
        gc.collect()
        gc.freeze()
        found: dict[str, list[float]] = {name: [] for name in (*rates, "reading")}
        for turn in range(ROUNDS + 1):
            for name, rate in rates.items():
                value = rate()
                if turn:  # the first warms up
                    found[name].append(value)
            if turn:
                found["reading"].append(bandwidth(256 << 20))

    def ratio(of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(found[of], found[to], strict=True))

    rows = []
    for name, size in (("bf16", weights), ("NVFP4", four_bytes)):
        share = ratio(name, "reading") * size
        most = statistics.median(found["reading"]) / size
        what = f"SmolLM2 decode, {name}, {threads} threads"
        rows.append(
            row(what, statistics.median(found[name]), "tokens/s", None, None, "reading the weights", most, share)
        )
    for mine, name, least in (
        ("bf16", "transformers", AGAINST_TRANSFORMERS),
        ("NVFP4", "llama.cpp", AGAINST_LLAMA_CPP),
    ):
        if name in rates:
            gain = ratio(mine, name)
            against = "llama.cpp, Q4_1" if name == "llama.cpp" else "transformers' generate, bf16"
            rows.append(row(f"SmolLM2 decode, {mine}, against {against}", gain, "x", gain >= least, f">= {least} x"))
    print("\n".join(skipped), file=sys.stderr)
    report = {"load": load, "threads": threads, "skipped": skipped, "tokens_per_s": found, "rows": rows}
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
