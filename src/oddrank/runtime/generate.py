"""The front door: a model directory and a plan in, text or logits out, every rank a process of its own."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from oddrank.checkpoint import Checkpoint
from oddrank.checkpoint.config import ConfigView
from oddrank.checkpoint.jsonfile import read_object
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.runtime.parallel.launch import Ranks
from oddrank.runtime.request import Completion, Loaded, Sampling, Timings
from oddrank.runtime.text import TextStream

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

OnText = Callable[[int, str], object]
"""Called with (index of the prompt, the text that came to it)."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


class TextOutput(msgspec.Struct, frozen=True):
    """One prompt's continuation. text: without special tokens; None where the model has no tokenizer. finish: "stop" or
    "length"."""

    text: str | None
    token_ids: list[int]
    finish: str
    prompt_tokens: int


class Generation(msgspec.Struct, frozen=True):
    """What `generate` returns.

    seconds: of prefill and decoding together, without loading. tokens_per_second: of decoding, all prompts
    together. load_seconds: from starting the ranks until all were loaded. ranks: per rank, in rank order.
    """

    tp: int
    dtype: str
    outputs: list[TextOutput]
    seconds: float
    tokens_per_second: float
    load_seconds: float
    timings: Timings
    ranks: list[Loaded]


class Session:
    """A model that runs: rank processes with their slices loaded. Use it in a `with` block.

    model: a model directory. plan: what its ranks hold (`plan.tp` of them). dtype: "bf16", "fp16", "fp32",
    "fp64"; None: what the config says. threads: of each rank, by default one a core of its slice.
    slots: sequences decoded together at most. chunk: prompt tokens a prefill step takes at most.
    experts: where routed experts are and who computes them.
    OddrankError for whatever goes wrong on any rank, naming it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        plan: Plan,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        slots: int = 16,
        chunk: int = 1024,
        experts: ExpertOptions = ExpertOptions(),  # noqa: B008 (immutable)
    ) -> None:
        from oddrank.runtime.worker import Job, serve

        experts.check(plan.model)
        checkpoint = Checkpoint.open(model)
        self.tp, self.path = plan.tp, checkpoint.path
        self.dtype = dtype or default_dtype(checkpoint)
        self.eos = end_tokens(checkpoint)
        job = Job(str(checkpoint.path), plan.to_json(), self.dtype, self.eos, slots, chunk, experts)
        self._start = time.perf_counter()
        self.load_seconds = 0.0
        self._loaded: list[Loaded] = []
        self._ranks = Ranks(plan.tp, serve, job, device=device, threads=threads)

    def wait(self) -> list[Loaded]:
        """Until every rank is loaded; what each holds, in rank order."""
        if not self._loaded:
            loaded: dict[int, Loaded] = {}
            while len(loaded) < self.tp:
                rank, message = self._ranks.receive()
                loaded[rank] = message
            self.load_seconds = time.perf_counter() - self._start
            self._loaded = [loaded[rank] for rank in range(self.tp)]
        return self._loaded

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        on_token: Callable[[int, int], object] | None = None,
    ) -> tuple[list[Completion], Timings]:
        """Continue every prompt (token ids). on_token: called with (prompt, token) as tokens come."""
        from oddrank.runtime.worker import Generated, GenerateRequest, Token

        request = GenerateRequest([list(p) for p in prompts], sampling or Sampling(), on_token is not None)
        answer = self._ask(request)
        while isinstance(answer, Token):
            if on_token is not None:
                on_token(answer.index, answer.token)
            answer = self._ranks.receive()[1]
        assert isinstance(answer, Generated)
        return answer.completions, answer.timings

    def logits(self, token_ids: Sequence[int]) -> "Tensor":
        """Logits at every position of one sequence, [tokens, vocab], in the activations' type."""
        import torch

        from oddrank.runtime.worker import LogitsRequest

        return torch.from_numpy(self._ask(LogitsRequest(list(token_ids))))

    def _ask(self, request: Any) -> Any:
        self.wait()
        self._ranks.send(request)
        return self._ranks.receive()[1]

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def generate(
    model: str | os.PathLike[str],
    plan: Plan,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling | None = None,
    *,
    chat: bool = False,
    on_text: OnText | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    slots: int = 16,
    experts: ExpertOptions = ExpertOptions(),  # noqa: B008 (immutable)
) -> Generation:
    """Start the ranks, load, continue the prompts, end the ranks. See `Session` for the options.

    prompts: texts, or token ids (which need no tokenizer, and get no text where there is none). chat: each text is a
    user's message, put in the model's chat template.
    """
    experts.check(plan.model)
    check_prompts(Path(model), plan, prompts)
    with Session(model, plan, dtype=dtype, device=device, threads=threads, slots=slots, experts=experts) as session:
        texts = any(isinstance(p, str) for p in prompts)
        tokenizer = None
        if texts or has_tokenizer(session.path):
            try:
                tokenizer = load_tokenizer(session.path)  # while the ranks load
            except OddrankError as error:
                if texts:
                    raise
                log.warning("%s Those that were given are continued, without a text.", error)
        ids = [encode(tokenizer, p, chat=chat) if isinstance(p, str) else list(p) for p in prompts]
        streams = [] if tokenizer is None else [TextStream(tokenizer) for _ in ids]

        def on_token(index: int, token: int) -> None:
            piece = streams[index].add(token)
            if piece and on_text is not None:
                on_text(index, piece)

        tell = on_token if on_text is not None and tokenizer is not None else None
        completions, timings = session.generate(ids, sampling, tell)
        ranks = session.wait()
    outputs = [
        TextOutput(
            None if tokenizer is None else tokenizer.decode(c.token_ids, skip_special_tokens=True),
            c.token_ids,
            c.finish,
            c.prompt_tokens,
        )
        for c in completions
    ]
    return Generation(
        tp=plan.tp,
        dtype=session.dtype,
        outputs=outputs,
        seconds=timings.prefill_seconds + timings.decode_seconds,
        tokens_per_second=timings.tokens_per_second,
        load_seconds=session.load_seconds,
        timings=timings,
        ranks=ranks,
    )


def check_prompts(path: Path, plan: Plan, prompts: Sequence[str | Sequence[int]]) -> None:
    """Raises OddrankError, before any rank is started, for a text without a tokenizer to read it by, or for token ids
    beyond the vocabulary."""
    if any(isinstance(p, str) for p in prompts) and not has_tokenizer(path):
        raise OddrankError(
            f"{path} has no tokenizer (no tokenizer.json), so a text cannot be turned into tokens. Give token ids "
            "(--prompt-ids 1,2,3), or add the model's tokenizer files."
        )
    vocab = plan.model.axis("vocab").count
    for prompt in prompts:
        wrong = [] if isinstance(prompt, str) else [t for t in prompt if not 0 <= t < vocab]
        if wrong:
            raise OddrankError(f"token id {wrong[0]} of a prompt is beyond the model's vocabulary, 0 to {vocab - 1}.")


def forward_logits(
    model: str | os.PathLike[str],
    plan: Plan,
    token_ids: Sequence[int],
    dtype: str,
    local: bool = True,
) -> "Tensor":
    """Logits at every position of one sequence, [tokens, vocab].

    local: all ranks in lockstep in this process; else one process a rank.
    """
    if not local:
        with Session(model, plan, dtype=dtype) as session:
            return session.logits(token_ids)
    from oddrank.runtime.worker import local_logits

    with Checkpoint.open(model) as checkpoint:
        return local_logits(plan, checkpoint, token_ids, dtype)


def has_tokenizer(path: Path) -> bool:
    """Is there anything of a tokenizer in the model directory?"""
    return any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def load_tokenizer(path: Path) -> Any:
    """The model directory's tokenizer. OddrankError where there is none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers' checks of the config and tokenizers' of its file have types of their own
        first = " ".join(str(error).split())[:400]
        raise OddrankError(
            f"{path} has no tokenizer that transformers can load ({first}). Give token ids, or add the model's "
            "tokenizer.json."
        ) from error


def encode(tokenizer: Any, text: str, *, chat: bool = False) -> list[int]:
    """A prompt's token ids, with whatever the tokenizer puts before it; or a user's message in the chat template.

    OddrankError where `chat` is asked for and the tokenizer has no template.
    """
    if not chat:
        return list(tokenizer(text).input_ids)
    if not tokenizer.chat_template:
        raise OddrankError("The model's tokenizer has no chat template. Generate without chat.")
    message = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(whole, add_special_tokens=False).input_ids)


def default_dtype(checkpoint: Checkpoint) -> str:
    """ "bf16", "fp16", "fp32" or "fp64": what the config says, else what most of the weights are stored in."""
    said = ConfigView(checkpoint.config).dtype()
    if said in _DTYPES:
        return _DTYPES[said]
    stored = [info.dtype for info in checkpoint.tensors.values()]
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
    return names.get(max(set(stored), key=stored.count), "bf16")


def end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Tokens that end a sequence: those of generation_config.json and of config.json."""
    found: set[int] = set()
    path = checkpoint.path / "generation_config.json"
    sources = [checkpoint.config, read_object(path)] if path.is_file() else [checkpoint.config]
    for source in sources:
        value = source.get("eos_token_id")
        found.update(t for t in (value if isinstance(value, Iterable) else [value]) if isinstance(t, int))
    return tuple(sorted(found))
