"""A tokenizer for a model of random values, which has none: a token a byte, and every other token says its own number.

So any text can be given to it and any token it answers with can be read, and nothing pretends to be a language.
"""

from __future__ import annotations

import json

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tokenizer_files(vocab: int, special: dict[str, int]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of `vocab` tokens; `special`: ids of `eos_token` and the like.

    Nothing where a byte has no room for a token, or where the tokenizers library is missing, without which no model is
    run either.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        return {}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = {f"<|{role.removesuffix('_token')}|>": token for role, token in special.items() if token < vocab}
    free = [token for token in range(vocab) if token not in named.values()]
    if len(free) < len(alphabet):
        return {}
    words = named | dict(zip(alphabet, free, strict=False)) | {f"Ġ{token}": token for token in free[len(alphabet) :]}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token) for token in named])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
        # said of each, as the model type's own class would add what it is not told
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
        **{f"{token[2:-2]}_token": token for token in named},
    }
    return {
        "tokenizer.json": (made.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }
