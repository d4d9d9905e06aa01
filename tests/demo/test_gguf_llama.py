"""The GGUF conversion on a tiny llama of known weights, written with the gguf library."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from oddrank.demo.gguf_llama import LlamaGguf, unpermute
from oddrank.demo.smollm2 import convert
from oddrank.errors import OddrankError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, LAYERS = 6, 2, 8, 48, 40, 2
# Byte-level BPE over "a", "b", "1", "2" and the space (written as byte-level BPE writes it).
TOKENS = ["<|end|>", "<|start|>", "a", "b", "1", "2", "\u0120", "ab", "\u0120ab", "12"]
MERGES = ["a b", "\u0120 ab", "1 2"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama.cpp, element by element: row 2i + j of a head is its row i + j * d/2."""
    per_head = weight.shape[0] // heads
    order = [
        head * per_head + i + j * per_head // 2 for head in range(heads) for i in range(per_head // 2) for j in range(2)
    ]
    return weight[order]


def tiny_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # not model.to(): that would round the rotary frequencies as well
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: str | None = None,
    head_dim: int = HEAD_DIM,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    # The keys of llama whatever the architecture says: the conversion must refuse it by name.
    writer.add_uint32("llama.vocab_size", len(TOKENS))
    writer.add_uint32("llama.context_length", 64)
    writer.add_uint32("llama.embedding_length", HIDDEN)
    writer.add_uint32("llama.feed_forward_length", MLP)
    writer.add_uint32("llama.block_count", LAYERS)
    writer.add_uint32("llama.attention.head_count", HEADS)
    writer.add_uint32("llama.attention.head_count_kv", KV_HEADS)
    writer.add_uint32("llama.rope.dimension_count", head_dim)
    writer.add_float32("llama.rope.freq_base", 50000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        match name.split("."):
            case ["model", "layers", layer, *part, "weight"]:
                stored = f"blk.{layer}.{NAMES['.'.join(part)]}.weight"
            case ["model", "embed_tokens", "weight"]:
                stored = "token_embd.weight"
            case ["model", "norm", "weight"]:
                stored = "output_norm.weight"
            case ["lm_head", "weight"]:
                if model.config.tie_word_embeddings:
                    continue
                stored = "output.weight"
        if "q_proj" in name or "k_proj" in name:
            weight = permute(weight, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(stored, np.ascontiguousarray(weight))
    if extra is not None:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unpermute_by_hand() -> None:
    # Two heads of 4 rows; a head's rotated pairs (0, 2) and (1, 3) lie side by side in the file.
    stored = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert unpermute(stored, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_is_the_model_that_was_written(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tied)
    convert(write_gguf(tmp_path / "tiny.gguf", model), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs, ours = model.state_dict(), loaded.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    tokens = torch.arange(len(TOKENS))[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_rounding_to_bfloat16_is_torchs() -> None:
    values = np.random.default_rng(5).normal(size=4096).astype(np.float32)
    values[:3] = [1.00390625, 1.01171875, -1.00390625]  # halfway: to even, down and up
    ours = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "falcon"}, "architecture 'falcon'"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"extra": "blk.0.attn_q.bias"}, "'blk.0.attn_q.bias' has no counterpart"),
        ({"head_dim": 4}, "6 heads of 4 are not its width 48"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: dict[str, str], said: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(True), **change)
    with pytest.raises(OddrankError, match=said):
        convert(path, tmp_path)


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model" * 10)
    with pytest.raises(OddrankError, match=r"can't be read as a GGUF file"):
        LlamaGguf(path)
