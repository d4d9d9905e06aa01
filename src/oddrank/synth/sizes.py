"""Sizes of published models: numbers per layer that a synthetic checkpoint keeps, whatever it leaves out.

`tiny` sizes are nobody's: small enough for a test to run, with several units of every axis and whole quantization
blocks.
"""

from __future__ import annotations

import msgspec


class Vision(msgspec.Struct, frozen=True):
    """The vision tower of the Qwen3.5 family."""

    depth: int
    hidden: int
    mlp: int
    heads: int


class Hybrid(msgspec.Struct, frozen=True):
    """Qwen3.5 / 3.6 / 3.8. mlp: width of the dense MLP, None where the layers have experts instead. moe, shared:
    widths of a routed expert and of the shared one."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    gdn_k_heads: int
    gdn_v_heads: int
    vision: Vision
    mlp: int | None = None
    experts: int = 0
    chosen: int = 0
    moe: int = 0
    shared: int = 0
    tied: bool = False
    vocab: int = 248320
    head_dim: int = 256
    gdn_width: int = 128


class Dense(msgspec.Struct, frozen=True):
    """The llama shape."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = False
    theta: float = 1e6
    eps: float = 1e-6


class Drafter(msgspec.Struct, frozen=True):
    """DFlash2. taps: target layers whose hidden states it reads. target_layers: layers of the target."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    taps: tuple[int, ...]
    target_layers: int
    block_size: int = 8
    conv_kernel: int = 2
    conv_group: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    window: int = 2048


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention: ranks of the two latents (query_rank None: queries come straight from the hidden
    state), widths of a head's plain and rotary part and of its values."""

    kv_rank: int
    query_rank: int | None
    plain: int
    rotary: int
    value: int


class Mixture(msgspec.Struct, frozen=True):
    """Attention, and experts in all layers but the first `dense`, whose MLP is `mlp` wide. moe: width of one; shared:
    how many more every token goes through. drafts: MTP layers, with a copy of embedding and head where `words`.
    groups: that experts form, and how many of them a token's are chosen from."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    chosen: int
    moe: int
    mlp: int = 0
    dense: int = 0
    shared: int = 0
    drafts: int = 0
    words: bool = False
    qk_norm: bool = False
    latent: Latent | None = None
    groups: tuple[int, int] = (1, 1)
    model_type: str | None = None
    theta: float = 1e6
    eps: float = 1e-6
    tied: bool = False


class Gemma(msgspec.Struct, frozen=True):
    """Gemma 3 and 4: every `period`-th layer attends to everything, the others to a window. full_kv_heads,
    full_head_dim: of those layers, where they differ. borrowing: layers that use another's keys and values.
    per_layer: width of Gemma 4's second embedding."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    window: int
    period: int = 6
    query_scalar: int = 256
    full_kv_heads: int | None = None
    full_head_dim: int | None = None
    keys_as_values: bool = False
    borrowing: int = 0
    per_layer: int = 0
    experts: int = 0
    chosen: int = 0
    moe: int = 0
    eps: float = 1e-6
    tied: bool = True


Size = Hybrid | Dense | Drafter | Mixture | Gemma

_VISION = Vision(depth=27, hidden=1152, mlp=4304, heads=16)
_SMALL_VISION = Vision(depth=12, hidden=768, mlp=3072, heads=12)
_MIDDLE_VISION = Vision(depth=24, hidden=1024, mlp=4096, heads=16)
_TINY_VISION = Vision(depth=2, hidden=64, mlp=128, heads=4)

_DEEPSEEK = Latent(512, 1536, 128, 64, 128)

SIZES: dict[str, dict[str, Size]] = {
    "qwen3_5": {
        "27B": Hybrid(64, 5120, 24, 4, 16, 48, _VISION, mlp=17408),
        "9B": Hybrid(32, 4096, 16, 4, 16, 32, _VISION, mlp=12288),
        "4B": Hybrid(32, 2560, 16, 4, 16, 32, _MIDDLE_VISION, mlp=9216, tied=True),
        "2B": Hybrid(24, 2048, 8, 2, 16, 16, _MIDDLE_VISION, mlp=6144, tied=True),
        "0.8B": Hybrid(24, 1024, 8, 2, 16, 16, _SMALL_VISION, mlp=3584, tied=True),
        "tiny": Hybrid(4, 256, 6, 2, 4, 8, _TINY_VISION, mlp=768, vocab=512, head_dim=128),
    },
    "qwen3_5_moe": {
        "35B-A3B": Hybrid(40, 2048, 16, 2, 16, 32, _VISION, experts=256, chosen=8, moe=512, shared=512),
        "tiny": Hybrid(
            4, 256, 6, 2, 4, 8, _TINY_VISION, experts=8, chosen=2, moe=256, shared=384, vocab=512, head_dim=128
        ),
    },
    "dflash": {
        "27B": Drafter(5, 5120, 32, 8, 128, 17408, 248320, taps=(1, 16, 31, 46, 61), target_layers=64),
        "tiny": Drafter(2, 256, 8, 4, 128, 768, 512, taps=(0, 2), target_layers=4, selector_rank=32, selector_top_k=4),
    },
    "llama": {
        "135M": Dense(30, 576, 9, 3, 64, 1536, 49152, tied=True, theta=1e5, eps=1e-5),
        "70B": Dense(80, 8192, 64, 8, 128, 28672, 128256, theta=5e5, eps=1e-5),
        "tiny": Dense(2, 384, 6, 2, 64, 768, 512, theta=1e4, eps=1e-5),
    },
    "mistral": {
        "7B": Dense(32, 4096, 32, 8, 128, 14336, 32768, eps=1e-5),
        "tiny": Dense(2, 256, 6, 2, 64, 768, 512, eps=1e-5),
    },
    "qwen2": {
        "7B": Dense(28, 3584, 28, 4, 128, 18944, 152064),
        "72B": Dense(80, 8192, 64, 8, 128, 29568, 152064),
        "tiny": Dense(2, 256, 4, 2, 64, 768, 512),
    },
    "qwen3": {
        "32B": Dense(64, 5120, 64, 8, 128, 25600, 151936),
        "0.6B": Dense(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
        "tiny": Dense(2, 256, 6, 2, 128, 768, 512),
    },
    "qwen3_moe": {
        "30B-A3B": Mixture(48, 2048, 32, 4, 128, 151936, 128, 8, 768, mlp=6144, qk_norm=True),
        "235B-A22B": Mixture(94, 4096, 64, 4, 128, 151936, 128, 8, 1536, mlp=12288, qk_norm=True),
        "tiny": Mixture(2, 256, 6, 2, 128, 512, 8, 2, 384, mlp=768, qk_norm=True),
    },
    "mixtral": {
        "8x7B": Mixture(32, 4096, 32, 8, 128, 32000, 8, 2, 14336, eps=1e-5),
        "8x22B": Mixture(56, 6144, 48, 8, 128, 32768, 8, 2, 16384, eps=1e-5),
        "tiny": Mixture(2, 256, 6, 2, 128, 512, 8, 2, 384, eps=1e-5),
    },
    "phi3": {
        "Phi-4": Dense(40, 5120, 40, 10, 128, 17920, 100352, theta=250000, eps=1e-5),
        "mini": Dense(32, 3072, 32, 32, 96, 8192, 32064, theta=1e4, eps=1e-5),
        "tiny": Dense(2, 384, 6, 2, 64, 768, 512, theta=1e4, eps=1e-5),
    },
    "seed_oss": {
        "36B": Dense(64, 5120, 80, 8, 128, 27648, 155136, theta=1e7),
        "tiny": Dense(2, 256, 6, 2, 64, 768, 512, theta=1e7),
    },
    "gpt_oss": {
        "20b": Mixture(24, 2880, 64, 8, 64, 201088, 32, 4, 2880, theta=150000, eps=1e-5),
        "120b": Mixture(36, 2880, 64, 8, 64, 201088, 128, 4, 2880, theta=150000, eps=1e-5),
        "tiny": Mixture(2, 256, 6, 2, 64, 512, 8, 2, 384, theta=150000, eps=1e-5),
    },
    "glm4_moe": {
        "4.7": Mixture(
            92, 5120, 96, 8, 128, 151552, 160, 8, 1536, mlp=12288, dense=3, shared=1, drafts=1, qk_norm=True, eps=1e-5
        ),
        "4.5-Air": Mixture(
            46, 4096, 96, 8, 128, 151552, 128, 8, 1408, mlp=10944, dense=1, shared=1, drafts=1, words=True, eps=1e-5
        ),
        "tiny": Mixture(3, 256, 6, 2, 128, 512, 8, 2, 384, mlp=768, dense=1, shared=1, qk_norm=True, eps=1e-5),
    },
    "qwen3_next": {
        "80B-A3B": Hybrid(
            48, 2048, 16, 2, 16, 32, _VISION, experts=512, chosen=10, moe=512, shared=512, vocab=151936
        ),
        "tiny": Hybrid(
            4, 256, 6, 2, 4, 8, _TINY_VISION, experts=8, chosen=2, moe=256, shared=384, vocab=512, head_dim=128
        ),
    },
    "gemma3": {
        "27B": Gemma(62, 5376, 32, 16, 128, 21504, 262208, 1024, query_scalar=168),
        "12B": Gemma(48, 3840, 16, 8, 256, 15360, 262208, 1024),
        "4B": Gemma(34, 2560, 8, 4, 256, 10240, 262208, 1024),
        "1B": Gemma(26, 1152, 4, 1, 256, 6912, 262144, 512),
        "tiny": Gemma(2, 384, 4, 2, 64, 768, 512, 4, period=2, query_scalar=64),
    },
    "deepseek_v3": {
        "671B": Mixture(
            61, 7168, 128, 128, 64, 129280, 256, 8, 2048, mlp=18432, dense=3, shared=1, drafts=1, words=True,
            latent=_DEEPSEEK, groups=(8, 4), theta=1e4,
        ),
        "Kimi-K2": Mixture(
            61, 7168, 64, 64, 64, 163840, 384, 8, 2048, mlp=18432, dense=1, shared=1, latent=_DEEPSEEK,
            model_type="kimi_k2", theta=5e4,
        ),
        "V2-Lite": Mixture(
            27, 2048, 16, 16, 64, 102400, 64, 6, 1408, mlp=10944, dense=1, shared=2,
            latent=Latent(512, None, 128, 64, 128), model_type="deepseek_v2", theta=1e4,
        ),
        "tiny": Mixture(
            3, 256, 8, 8, 64, 512, 8, 2, 384, mlp=768, dense=1, shared=1, latent=Latent(128, 256, 64, 64, 64),
            groups=(2, 1), theta=1e4,
        ),
    },
    "minimax_m2": {
        "M2": Mixture(62, 3072, 48, 8, 128, 200064, 256, 8, 1536, theta=5e6),
        "tiny": Mixture(2, 256, 6, 2, 128, 512, 8, 2, 384, theta=5e6),
    },
    "gemma4": {
        "31B": Gemma(
            60, 5376, 32, 16, 256, 21504, 262144, 1024, full_kv_heads=4, full_head_dim=512, keys_as_values=True
        ),
        "26B-A4B": Gemma(
            30, 2816, 16, 8, 256, 2112, 262144, 1024, full_kv_heads=2, full_head_dim=512, keys_as_values=True,
            experts=128, chosen=8, moe=704,
        ),
        "E2B": Gemma(
            35, 1536, 8, 1, 256, 6144, 262144, 512, period=5, full_head_dim=512, borrowing=20, per_layer=256
        ),
        "tiny": Gemma(
            2, 256, 8, 4, 64, 768, 512, 4, period=2, full_kv_heads=2, full_head_dim=128, keys_as_values=True,
            experts=8, chosen=2, moe=384,
        ),
    },
}
"""Family -> size name -> numbers; the first of each family is its default."""
