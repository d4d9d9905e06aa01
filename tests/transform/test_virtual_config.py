"""The virtual checkpoint's config, and the same weights under another architecture's name: transformers must load
them and give the same float64 logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from layout.shapes import VARIANTS, Config, config, plan
from proof.random_plans import tiny_subject
from proof.tiny import Memory, random_weights, transformers_config, transformers_logits

from oddrank.errors import OddrankError
from oddrank.families import families
from oddrank.families.respell import as_mistral, as_seed_oss
from oddrank.layout.plan import Plan
from oddrank.transform.config import virtual_config
from oddrank.transform.recipe import materialize, recipes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def padded(c: Config, tp: int, reader: str) -> tuple[Plan, Config, Config]:
    """(plan, its virtual config for `reader`, the stock config)."""
    p = plan(tiny_subject(c), tp, "vllm", "pad").plan
    return p, virtual_config(p, c, reader), c


def logits_agree(c: Config, tp: int, reader: str) -> Config:
    """The virtual config, after transformers has computed the stock model's logits with it."""
    rng = np.random.default_rng(tp)
    weights = random_weights(c, rng)
    prompt = rng.integers(0, c["vocab_size"], 9).tolist()
    p, v, _ = padded(c, tp, reader)
    memory = Memory(weights)
    made = {n: materialize(r, memory.array(n)).view(np.float64) for n, r in recipes(p, p.virtual()).items()}
    reference = transformers_logits(c, weights, prompt)
    assert np.abs(reference).max() > 0.5
    assert np.abs(transformers_logits(v, made, prompt) - reference).max() < 1e-10
    return v


@pytest.mark.parametrize("reader", ["transformers", "vllm"])
@pytest.mark.parametrize("tp", [2, 5, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_name_it_gets_the_logits_are_the_same(variant: str, tp: int, reader: str) -> None:
    c = config(variant, q=9, kv=3, head_dim=4, mlp=22, vocab=50, torch_dtype="float64", rope_theta=3333.0)
    v = logits_agree(c, tp, reader)
    assert v["head_dim"] == 4
    assert v["num_attention_heads"] % tp == 0 and v["num_key_value_heads"] % tp == 0


@pytest.mark.parametrize(
    ("variant", "reader", "name"),
    [
        ("llama", "transformers", "mistral"),
        ("llama", "vllm", "mistral"),
        ("llama+qkv_bias+o_bias", "transformers", "seed_oss"),
        ("llama+qkv_bias+o_bias+mlp_bias", "transformers", "seed_oss"),
        ("mistral", "transformers", "mistral"),
        ("qwen2", "transformers", "qwen2"),  # transformers' qwen2 reads head_dim
        ("qwen2", "vllm", "seed_oss"),  # vLLM's does not
        ("qwen3", "vllm", "qwen3"),
        ("qwen3+qkv_bias+o_bias", "vllm", "qwen3"),
    ],
)
def test_names(variant: str, reader: str, name: str) -> None:
    """9/3 heads of 4 at 4 ranks: 12/4, and 36 hidden is not 12 x 4... nor, at 5 ranks, a multiple of the heads."""
    _, v, _ = padded(config(variant, q=9, kv=3, head_dim=4), 5, reader)
    assert v["hidden_size"] % v["num_attention_heads"]
    assert v["model_type"] == name
    made = transformers_config(v)
    assert made.model_type == name
    assert (made.num_attention_heads, made.num_key_value_heads) == (15, 5)
    assert made.head_dim == 4


def test_a_padded_llama_that_transformers_takes_stays_llama() -> None:
    """12 heads divide a hidden size of 36: LlamaConfig takes it with head_dim written out."""
    _, v, _ = padded(config("llama", q=9, kv=3, head_dim=4), 4, "transformers")
    assert v["model_type"] == "llama" and v["head_dim"] == 4 and v["num_attention_heads"] == 12
    logits_agree(config("llama", q=9, kv=3, head_dim=4, mlp=22, vocab=50, torch_dtype="float64"), 4, "transformers")


def test_llama_refuses_what_the_respelling_is_for() -> None:
    """If a release of transformers takes such a config, the respelling can go."""
    _, v, c = padded(config("llama", q=9, kv=3, head_dim=4), 5, "transformers")
    with pytest.raises(Exception, match=r"hidden|heads"):
        transformers_config({**v, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert c["model_type"] == "llama"


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_what_must_change_changes(variant: str) -> None:
    c = config(variant, q=9, kv=3, head_dim=4, mlp=22, eos_token_id=7, something_of_our_own={"a": [1, 2]})
    before = repr(c)
    for tp in (2, 5):
        _, v, _ = padded(c, tp, "vllm")
        counts = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")
        spelling = (
            "model_type",
            "architectures",
            "sliding_window",
            "attention_bias",
            "attention_out_bias",
            "mlp_bias",
            "attention_dropout",
            "residual_dropout",
        )
        for key, value in c.items():
            if key not in counts + spelling:
                assert v[key] == value
        assert v["vocab_size"] == c["vocab_size"]
    assert repr(c) == before


def test_the_identity_s_config_is_the_stock_config() -> None:
    c = config("llama", q=8, kv=4)
    p = plan(tiny_subject({**c, "torch_dtype": "float64"}), 2, "vllm").plan
    assert p.is_identity() and virtual_config(p, c) is c


@pytest.mark.parametrize(
    ("variant", "spelled"),
    [("llama", as_mistral), ("llama+qkv_bias+o_bias+mlp_bias", as_seed_oss), ("qwen2", as_seed_oss)],
)
def test_what_a_config_leaves_out_keeps_its_meaning(variant: str, spelled: Any) -> None:
    """Defaults differ between config classes: what is absent must still mean what it meant under its own name."""
    left_out = (
        "rms_norm_eps",
        "rope_theta",
        "hidden_act",
        "max_position_embeddings",
        "tie_word_embeddings",
        "torch_dtype",
    )
    c = {k: v for k, v in config(variant, q=8, kv=4).items() if k not in left_out}
    c["head_dim"] = 8
    if spelled is as_mistral:
        other = as_mistral(c)
    else:
        v = VARIANTS[variant]
        other = as_seed_oss(c, qkv_bias=v.qkv_bias, o_bias=v.o_bias, mlp_bias=v.mlp_bias)
    ours, theirs = transformers_config(c), transformers_config(other)
    assert theirs.model_type != ours.model_type
    for key in (
        "rms_norm_eps",
        "rope_parameters",
        "hidden_act",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "num_hidden_layers",
    ):
        assert getattr(theirs, key) == getattr(ours, key), key
    assert getattr(theirs, "sliding_window", None) is None
    assert theirs.attention_dropout == 0 and getattr(theirs, "residual_dropout", 0) == 0


def test_other_rope_settings_survive() -> None:
    scaled = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    c = config("llama", q=9, kv=3, head_dim=8, mlp=22, vocab=50, torch_dtype="float64", rope_scaling=scaled)
    v = logits_agree(c, 5, "transformers")
    assert v["rope_scaling"] == scaled


def test_a_window_that_the_other_name_has_not() -> None:
    c = config("qwen2", q=9, kv=3, head_dim=4, use_sliding_window=True, sliding_window=16, max_window_layers=0)
    p = plan(tiny_subject({**c, "torch_dtype": "float64"}), 2, "vllm", "pad").plan
    with pytest.raises(OddrankError, match=r"no sliding window.*runtime executor serves it"):
        virtual_config(p, c, "vllm")
    assert virtual_config(p, c, "transformers")["model_type"] == "qwen2"


def test_a_mistral_window_stays() -> None:
    c = config("mistral", q=9, kv=3, head_dim=4, mlp=22, vocab=50, torch_dtype="float64", sliding_window=4)
    assert logits_agree(c, 5, "transformers")["sliding_window"] == 4


def test_every_family_knows_how_it_is_respelled() -> None:
    for family in families().values():
        c = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8, "model_type": family.model_types[0]}
        for reader in ("transformers", "vllm"):
            assert family.respell(dict(c), reader) == c
