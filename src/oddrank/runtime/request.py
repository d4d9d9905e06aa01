"""What is asked of an engine and what comes back: values that need no torch."""

import msgspec

from oddrank.errors import OddrankError
from oddrank.layout.capacity import Room


class Sampling(msgspec.Struct, frozen=True):
    """How a sequence goes on.

    max_tokens: how many to generate at most. temperature: 0 takes the likeliest token. top_k: choose among the
    k likeliest (0: all). top_p: choose among the fewest tokens whose probabilities reach p together.
    min_p: choose among tokens at least this likely, as a share of the likeliest's probability (0: all).
    logit_bias: (token, what is added to its logit), before everything else.
    seed: makes a run repeatable; the i-th prompt of a call draws from seed + i, whatever it is batched with.
    stop: tokens that end the sequence besides the model's own. ignore_eos: go on past the model's own.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def check(self) -> None:
        """OddrankError for values that mean nothing."""
        for name, ok, means in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or 1e-3 <= self.temperature <= 1e3, "0 (greedy), or 0.001 to 1000"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
        ):
            if not ok:
                raise OddrankError(f"{name} is {getattr(self, name)} and must be {means}.")


class Completion(msgspec.Struct, frozen=True):
    """What one prompt was continued with.

    token_ids: without the prompt; a token that ended it is the last one. finish: "stop" or "length".
    """

    token_ids: list[int]
    finish: str
    prompt_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Of one call of `Engine.generate`: seconds, and what was done in them. Decoding chooses every token but
    each sequence's first, which comes out of its prefill. prepare_seconds: what the engine took, once, when it
    started, to bring the weights into the form that the kernels of the machine take."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    cache_bytes: int = 0
    prepare_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, all sequences together; 0 where nothing was decoded."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0


class Loaded(msgspec.Struct, frozen=True):
    """Of one rank. stored_bytes: its slice as stored. kept_bytes: what its parameters hold.

    seconds: of copying the slice into the parameters. prepare_seconds: of bringing them into the form that the
    kernels take, where that was done by then (an engine does it when it starts: Timings.prepare_seconds).
    skipped: optional parts of the checkpoint that the model does not run ("MTP", "vision") -> stored tensors not read.
    experts: who computes the routed experts, in words; "" where the model has none.
    room: the rank's memory and what a token of KV cache takes of it. cache_tokens: how many fit on every rank (None: no
    rank keeps any); both are told once the ranks are started.
    """

    stored_bytes: int
    kept_bytes: int
    seconds: float
    prepare_seconds: float = 0.0
    skipped: dict[str, int] = msgspec.field(default_factory=dict)
    experts: str = ""
    room: Room | None = None
    cache_tokens: int | None = None
