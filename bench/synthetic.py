"""Random checkpoints of the qwen3 family, of any size, for the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oddrank.checkpoint.writer import Entry, header_bytes

BLOCK = 32 << 20  # bytes of random numbers, repeated: nothing here depends on their values


class Shape(NamedTuple):
    """A qwen3 model. Weights are bf16, in `shards` files of about the same size."""

    q: int
    kv: int
    hidden: int
    mlp: int
    vocab: int
    layers: int
    shards: int = 1
    head_dim: int = 128

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.q,
            "num_key_value_heads": self.kv,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> list[Entry]:
        """Every tensor as transformers names and shapes it."""
        h, d = self.hidden, self.head_dim
        made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h)}
        for i in range(self.layers):
            at = f"model.layers.{i}"
            made |= {
                f"{at}.self_attn.q_proj.weight": (self.q * d, h),
                f"{at}.self_attn.k_proj.weight": (self.kv * d, h),
                f"{at}.self_attn.v_proj.weight": (self.kv * d, h),
                f"{at}.self_attn.o_proj.weight": (h, self.q * d),
                f"{at}.self_attn.q_norm.weight": (d,),
                f"{at}.self_attn.k_norm.weight": (d,),
                f"{at}.mlp.gate_proj.weight": (self.mlp, h),
                f"{at}.mlp.up_proj.weight": (self.mlp, h),
                f"{at}.mlp.down_proj.weight": (h, self.mlp),
                f"{at}.input_layernorm.weight": (h,),
                f"{at}.post_attention_layernorm.weight": (h,),
            }
        made |= {"model.norm.weight": (h,), "lm_head.weight": (self.vocab, h)}
        return [(name, "BF16", shape) for name, shape in made.items()]


# As Qwen3-32B: 707 tensors, 61 GiB
LARGE = Shape(q=64, kv=8, hidden=5120, mlp=25600, vocab=151936, layers=64, shards=17)
# 1.3 GiB; 24 query and 4 KV heads, and a width that neither 3 nor 3 * 64 divides
ODD = Shape(q=24, kv=4, hidden=3072, mlp=8192, vocab=32000, layers=5, shards=3)


def size_of(entry: Entry) -> int:
    return 2 * int(np.prod(entry[2], dtype=np.int64))


def write(shape: Shape, path: Path, sparse: bool = False) -> int:
    """Make the checkpoint; returns its bytes. sparse: headers and holes, which take no room on the disk."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(shape.config(), indent=2))
    entries = shape.tensors()
    total = sum(map(size_of, entries))
    files: list[list[Entry]] = [[] for _ in range(shape.shards)]
    done = 0
    for entry in entries:
        files[min(shape.shards - 1, done * shape.shards // total)].append(entry)
        done += size_of(entry)
    # small normal numbers: any of them may be multiplied without overflow
    noise = (np.random.default_rng(0).standard_normal(BLOCK // 4, np.float32) * 0.02).view(np.uint32) >> 16
    block = memoryview(noise.astype(np.uint16).tobytes())
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = "model.safetensors" if shape.shards == 1 else f"model-{number:05}-of-{shape.shards:05}.safetensors"
        weight_map |= {entry[0]: name for entry in part}
        with open(path / name, "wb") as file:
            file.write(header_bytes(part, {"format": "pt"}))
            left = sum(map(size_of, part))
            if sparse:
                file.truncate(file.tell() + left)
                continue
            while left:
                left -= file.write(block[: min(left, len(block))])
    if shape.shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
