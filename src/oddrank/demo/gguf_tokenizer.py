"""The tokenizer that a GGUF's metadata describes, as Hugging Face's `tokenizer.json` and its companions."""

from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from oddrank.errors import OddrankError

_CONTROL = 3  # gguf TokenType.CONTROL: never produced from plain text, skipped when decoding


class Metadata(Protocol):
    """What is needed of a GGUF file."""

    def field(self, key: str) -> Any: ...


def build_tokenizer(gguf: Metadata) -> Tokenizer:
    """Byte-level BPE with the vocabulary, merges and control tokens of `gguf`.

    Only llama.cpp's pre-tokenizer "smollm" is known: each digit (Unicode class N) alone, then GPT-2's split.
    It decides which merges can meet, so another one is refused rather than guessed.
    """
    kind, pre = gguf.field("tokenizer.ggml.model"), gguf.field("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise OddrankError(
            f"the GGUF's tokenizer is {kind!r} with pre-tokenizer {pre!r}; this conversion knows 'gpt2' with "
            "'smollm' only"
        )
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    kinds: list[int] = gguf.field("tokenizer.ggml.token_type")
    merges: list[tuple[str, str]] = []
    for merge in gguf.field("tokenizer.ggml.merges"):
        left, right = merge.split(" ")
        merges.append((left, right))

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_kind in zip(tokens, kinds, strict=True)
            if token_kind == _CONTROL
        ]
    )
    return tokenizer


def special_tokens(gguf: Metadata) -> dict[str, str]:
    """`special_tokens_map.json`: role -> token text."""
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: gguf.field(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    return {f"{role}_token": tokens[token_id] for role, token_id in ids.items()}


def tokenizer_config(gguf: Metadata) -> dict[str, Any]:
    """`tokenizer_config.json`, chat template included.

    The class is the generic one: transformers' GPT2Tokenizer would put GPT-2's own pre-tokenizer, which keeps
    runs of digits together, in place of the stored one.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens(gguf),
        "add_bos_token": bool(gguf.field("tokenizer.ggml.add_bos_token")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(gguf.field("llama.context_length")),
        "chat_template": gguf.field("tokenizer.chat_template"),
    }
