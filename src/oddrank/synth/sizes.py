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


_VISION = Vision(depth=27, hidden=1152, mlp=4304, heads=16)
_SMALL_VISION = Vision(depth=12, hidden=768, mlp=3072, heads=12)
_MIDDLE_VISION = Vision(depth=24, hidden=1024, mlp=4096, heads=16)
_TINY_VISION = Vision(depth=2, hidden=64, mlp=128, heads=4)

SIZES: dict[str, dict[str, Hybrid | Dense | Drafter]] = {
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
}
"""Family -> size name -> numbers; the first of each family is its default."""
