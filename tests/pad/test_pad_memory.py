"""Anonymous memory of `oddrank pad`, whatever the size of a tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from oddrank.checkpoint.writer import header_bytes

HIDDEN, MLP, Q, KV, HEAD_DIM, VOCAB = 384, 200_001, 8, 4, 64, 1000
LIMIT = 110 << 20
"""Bytes: below the size of one matrix of the MLP, 146 MiB."""


def write_holes(path: Path) -> None:
    """A checkpoint of zeros that takes no room: 146 MiB a matrix of the MLP."""
    path.mkdir()
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": Q,
        "num_key_value_heads": KV,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    at = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{at}.self_attn.q_proj.weight": (Q * HEAD_DIM, HIDDEN),
        f"{at}.self_attn.k_proj.weight": (KV * HEAD_DIM, HIDDEN),
        f"{at}.self_attn.v_proj.weight": (KV * HEAD_DIM, HIDDEN),
        f"{at}.self_attn.o_proj.weight": (HIDDEN, Q * HEAD_DIM),
        f"{at}.self_attn.q_norm.weight": (HEAD_DIM,),
        f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
        f"{at}.mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{at}.mlp.up_proj.weight": (MLP, HIDDEN),
        f"{at}.mlp.down_proj.weight": (HIDDEN, MLP),
        f"{at}.input_layernorm.weight": (HIDDEN,),
        f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    with open(path / "model.safetensors", "wb") as file:
        file.write(header_bytes([(name, "BF16", shape) for name, shape in shapes.items()]))
        size = sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
        file.truncate(file.tell() + size)


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    write_holes(tmp_path / "model")
    peak = 0
    with subprocess.Popen(
        [sys.executable, "-m", "oddrank", "pad", tmp_path / "model", tmp_path / "out", "--tp", "5", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        status = Path(f"/proc/{process.pid}/status")
        samples = 0
        while process.poll() is None:
            for line in status.read_text().splitlines():
                if line.startswith("RssAnon"):
                    peak = max(peak, int(line.split()[1]) << 10)
                    samples += 1
            try:
                process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
    assert process.returncode == 0 and samples > 20
    # every matrix of the layer changed, rows and columns
    assert report["changed"] == 7 and report["bytes_written"] > 3 * HIDDEN * MLP * 2
    assert 0 < peak < LIMIT < HIDDEN * MLP * 2
