"""A llama GGUF's weights and hyperparameters, as Hugging Face stores them.

Two things differ between the formats besides names. GGUF weights are block-quantized, so they are dequantized
here (exactly, to float32). And llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head where Hugging Face
rotates (i, i + d/2), so its converter reorders the rows of every q and k head; `unpermute` puts them back.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from oddrank.errors import OddrankError

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection back in Hugging Face's order.

    `weight`: [heads * d, hidden] with each head's rows as d/2 neighbouring (first half, second half) pairs.
    Returns the same shape with each head's first halves before its second halves: the inverse of `permute` in
    llama.cpp's convert_hf_to_gguf.py. For k, `heads` is the number of KV heads.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


class LlamaGguf:
    """One open GGUF file of architecture "llama"."""

    def __init__(self, path: Path) -> None:
        """Opens `path` (memory-mapped). Raises OddrankError if it is no GGUF or of another architecture."""
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise OddrankError(f"{path} can't be read as a GGUF file: {error}") from error
        self.path = path
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise OddrankError(
                f"{path} holds a model of architecture {architecture!r}; this conversion knows 'llama' only"
            )
        self.heads = int(self.field("llama.attention.head_count"))
        self.kv_heads = int(self.field("llama.attention.head_count_kv"))
        self.tied = all(tensor.name != "output.weight" for tensor in self._reader.tensors)

    def field(self, key: str) -> Any:
        """The metadata value `key`; OddrankError if the file lacks it."""
        field = self._reader.get_field(key)
        if field is None:
            raise OddrankError(f"{self.path} has no metadata field {key!r}: it is not the expected model")
        return field.contents()

    def config(self) -> dict[str, Any]:
        """`config.json` of a `LlamaForCausalLM` with these hyperparameters, in bfloat16."""
        hidden = int(self.field("llama.embedding_length"))
        head_dim = int(self.field("llama.rope.dimension_count"))
        if head_dim * self.heads != hidden:
            raise OddrankError(
                f"{self.path}: {self.heads} heads of {head_dim} are not its width {hidden}; "
                "partial rotary embeddings and wider heads are not converted here"
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(self.field("llama.vocab_size")),
            "hidden_size": hidden,
            "intermediate_size": int(self.field("llama.feed_forward_length")),
            "num_hidden_layers": int(self.field("llama.block_count")),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": int(self.field("llama.context_length")),
            "rms_norm_eps": _short(self.field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _short(self.field("llama.rope.freq_base")),
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.tied,
            "bos_token_id": int(self.field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self.field("tokenizer.ggml.eos_token_id")),
            "pad_token_id": int(self.field("tokenizer.ggml.padding_token_id")),
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor as (Hugging Face name, float32 array in row-major [out, in] order)."""
        for tensor in self._reader.tensors:
            name = self._name(tensor.name)
            weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if name.endswith("q_proj.weight"):
                weight = unpermute(weight, self.heads)
            elif name.endswith("k_proj.weight"):
                weight = unpermute(weight, self.kv_heads)
            yield name, weight

    def _name(self, stored: str) -> str:
        if stored in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[stored]
        match stored.split("."):
            case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
                return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        raise OddrankError(f"{self.path}: tensor {stored!r} has no counterpart in a llama checkpoint")


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
