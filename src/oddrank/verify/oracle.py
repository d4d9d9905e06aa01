"""The oracle: transformers on the original checkpoint, TP=1, no oddrank code in its path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from oddrank.errors import OddrankError
from oddrank.verify.compare import Logits
from oddrank.verify.decode import plain_state, quantization_of
from oddrank.words import counted

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def transformers_logits(model: str | os.PathLike[str], prompts: Sequence[Sequence[int]], dtype: str) -> list[Logits]:
    """Logits at every position of every prompt (token ids), [tokens, vocab] each, by transformers in `dtype`.

    Quantized weights are decoded to `dtype` first (see decode.py): the oracle quantizes no activations.
    Raises OddrankError where transformers cannot load the directory.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded = _load(os.fspath(model), getattr(torch, DTYPES[dtype]))
    except OddrankError:
        raise
    except Exception as error:  # transformers' checks of a config have types of their own
        first = " ".join(str(error).split())[:400]
        raise OddrankError(f"transformers cannot load {model}, so nothing can be verified: {first}") from error
    loaded.eval()
    found: list[Logits] = []
    with torch.inference_mode():
        for ids in prompts:
            out = loaded(torch.tensor([list(ids)]), use_cache=False)
            found.append(np.asarray(out.logits[0].double().numpy(), dtype=np.float64))
    return found


def _load(model: str, dtype: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    # plain loops: transformers' faster experts know no float64
    options = {
        "dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True,
    }  # fmt: skip
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    quantization = quantization_of(config.to_dict())
    if quantization is None:
        loaded, info = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, **options)
    else:
        cls = AutoModelForCausalLM._model_mapping[type(config)]
        text = config if cls.config_class is type(config) else config.get_text_config()
        for part in (config, text):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        state = plain_state(model, quantization, dtype)
        loaded, info = cls.from_pretrained(None, config=text, state_dict=state, **options)
    missing = sorted(info["missing_keys"])
    if missing:
        raise OddrankError(
            f"transformers finds no weights for {counted(len(missing), 'tensor')} of {model} "
            f"({', '.join(missing[:3])}), so nothing can be verified."
        )
    return loaded


DEFAULT_TEXTS = (
    "The history of the bicycle begins in the early nineteenth century, when a German inventor",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at a lower temperature on a mountain because",
)


def default_prompts(model: str | os.PathLike[str], vocab: int) -> list[list[int]]:
    """Token ids of a few fixed texts; for a checkpoint without a tokenizer, seeded random ones (a tiny test model)."""
    from pathlib import Path

    from oddrank.runtime.generate import encode, load_tokenizer

    if (Path(model) / "tokenizer.json").exists() or (Path(model) / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(Path(model))
        return [encode(tokenizer, text) for text in DEFAULT_TEXTS]
    random = np.random.default_rng(0)
    return [random.integers(0, vocab, size=n).tolist() for n in (24, 7)]
