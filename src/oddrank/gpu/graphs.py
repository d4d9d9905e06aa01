"""Decode steps captured in CUDA graphs: a step costs the host one launch.

Steps of up to 1, 2, 4, 8, ... sequences have a graph each, and one for as many as the cache has slots; fewer sequences
are filled up with the slots after them, which must be idle: what those hold is overwritten, and nobody reads the
results. The first step of a size runs as always and is captured; the
next ones are replayed. Tokens and positions are read from memory that stays where it is. A graph belongs to one
cache and one table of angles and goes with them. All graphs share one pool of memory, so a step's logits last until
the next. Collectives are captured with the rest: ranks make the same steps at the same time.

recorded.py does the same on CPUs, by means of its own.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from oddrank.gpu.attention import PagedDecode, by_pages
from oddrank.runtime.cache import BLOCK, KVCache
from oddrank.runtime.experts import Experts
from oddrank.runtime.layers.attention import Attention, RotaryAttention
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.step import Segment, Step

log = logging.getLogger(__name__)


def size_for(n: int, slots: int) -> int:
    """How many sequences the graph takes in which n are decoded."""
    return min(1 << (n - 1).bit_length(), slots)


def room_for(longest: int, capacity: int) -> int:
    """How much of a cache a graph reads that masks what lies past a sequence's end: at most a quarter more than the
    longest sequence (or one block), so that a few graphs serve all lengths; and no more than there is already, where
    that is enough."""
    step = max(BLOCK, (1 << (longest - 1).bit_length()) // 8)
    room = -(-longest // step) * step
    return min(room, capacity) if longest <= capacity else room


class StaticStep(Step):
    """A decode step of any sequences in slots 0, 1, ...: of which only device memory says how long they are.

    tokens, positions: int64 [n], read when the step runs. room: the cache is read up to here, and masked from each
    sequence's end on.
    """

    static = True

    def __init__(self, tokens: Tensor, positions: Tensor, room: int) -> None:
        n = len(tokens)
        self.tokens, self.positions, self.decode = tokens, positions, True
        self.segments = tuple(Segment(i, i, i + 1, room - 1) for i in range(n))
        self.longest, self.uniform, self.sequences = room, False, [(1, room)] * n
        self.views: dict[Any, Any] = {}
        self._masks = {}

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        key = (None, window, dtype)
        if key not in self._masks:
            at, now = torch.arange(self.longest, device=self.tokens.device), self.positions[:, None]
            hidden = at > now
            if window is not None:
                hidden = hidden | (at <= now - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=self.tokens.device)
            self._masks[key] = zeros.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._masks[key]

    def first_key(self, window: int | None) -> int:
        return 0


class Captured(Protocol):
    """Work that was captured."""

    def replay(self) -> Tensor:
        """Do it; what it gives, in memory that the next replay of any writes to."""
        ...


class _CudaGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    out: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.out


class CudaCapture:
    """Captures work into CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # nccl's own thread asks the device meanwhile: other threads' calls must not end the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        return _CudaGraph(graph, out)


class _Graph(NamedTuple):
    """A captured step. kept: what it points into that somebody else might drop."""

    inputs: Tensor
    plans: list[PagedDecode]
    captured: Captured
    kept: tuple[object, ...]


class _Place(NamedTuple):
    cache: KVCache
    capacity: int
    angles: Tensor

    def is_still(self, now: "_Place") -> bool:
        return self.cache is now.cache and self.capacity == now.capacity and self.angles is now.angles


class GraphSteps:
    """Decode steps of one rank's model on a GPU, as recorded.DecodeSteps on CPUs. capture: None captures nothing."""

    def __init__(
        self, model: Llama, record: bool = True, capture: Callable[[Callable[[], Tensor]], Captured] | None = None
    ) -> None:
        self.model = model
        self._capture = (capture or CudaCapture()) if record else None
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._place: _Place | None = None
        self._checked = False
        self.replayed = 0
        """Steps that were replayed."""

    @property
    def recording(self) -> bool:
        """Whether steps may be captured."""
        return self._capture is not None

    def __call__(self, tokens: Sequence[int], past: Sequence[int], cache: KVCache) -> Tensor:
        """The logits [n, vocab] of one more token of each of the sequences in slots 0 to n - 1, which hold `past`
        tokens. Good until the next step."""
        model, n, longest = self.model, len(tokens), max(past) + 1
        if not self._able(longest):
            sequences = [(slot, [token], held) for slot, (token, held) in enumerate(zip(tokens, past, strict=True))]
            return model.logits(model(Step.of(sequences, model.group.device), cache))
        size, room = size_for(n, cache.slots), room_for(longest, cache.capacity)
        cache.reserve(room)
        if by_pages(cache):
            room = cache.capacity
        model.rotary.reserve(room)
        self._settle(cache)
        found = self._graphs.get((size, room))
        if found is None:
            return self._first(tokens, past, cache, size, room)
        self._set(found.inputs, tokens, past)
        for plan in found.plans:
            plan.plan(_lengths(past, size))
        self.replayed += 1
        return found.captured.replay()[:n]

    def nbytes(self) -> int:
        """Bytes of the graphs' inputs; what they compute in is torch's to tell."""
        return sum(graph.inputs.nbytes for graph in self._graphs.values())

    def forget(self) -> None:
        """Drop what was captured, and with it the hold on the cache."""
        self._graphs.clear()
        self._place = None

    def _able(self, longest: int) -> bool:
        if self._capture is None or self.model.rotary.stretched(longest):
            return False
        if not self._checked:
            self._checked = True
            elsewhere = {
                module.backend.name for module in self.model.modules() if isinstance(module, Experts) and module.width
            } - {"resident"}
            if elsewhere:
                self._give_up(f"experts are computed by the backend {', '.join(sorted(elsewhere))}")
        return self._capture is not None

    def _give_up(self, why: str) -> None:
        log.warning("decode steps are not captured in CUDA graphs, each is launched by the host, more slowly: %s", why)
        self._capture = None
        self.forget()

    def _settle(self, cache: KVCache) -> None:
        place = _Place(cache, cache.capacity, self.model.rotary.table[0])
        before = self._place
        if before is None or not before.is_still(place):
            self.forget()
            self._place = place

    def _first(self, tokens: Sequence[int], past: Sequence[int], cache: KVCache, size: int, room: int) -> Tensor:
        """Compute a step of a new size, with everything that only the first needs, and capture one."""
        model, device = self.model, self.model.group.device
        inputs = torch.zeros(2, size, dtype=torch.int64, device=device)
        self._set(inputs, tokens, past)
        plans = self._plans(cache, size)
        for plan in plans.values():
            plan.plan(_lengths(past, size))

        def work() -> Tensor:
            step = StaticStep(inputs[0], inputs[1], room)
            step.views.update(plans)
            return model.logits(model.run_blocks(model.embed(step.tokens), step, cache))

        logits = work()[: len(tokens)]
        assert self._capture is not None
        captured, why = None, ""
        try:
            captured = self._capture(work)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        if not self._all_agree(captured is not None):
            self._give_up(why or "another rank could not")
        elif captured is not None:
            kept = (model.rotary.table, self._place)
            self._graphs[size, room] = _Graph(inputs, list(plans.values()), captured, kept)
        return logits

    def _plans(self, cache: KVCache, size: int) -> dict[Any, PagedDecode]:
        """For each window of the model's layers: attention by pages, where that is who computes it."""
        if not by_pages(cache):
            return {}
        made: dict[Any, PagedDecode] = {}
        for module in self.model.modules():
            if isinstance(module, RotaryAttention) and module.attention.heads.q_heads:
                at: Attention = module.attention
                q_heads = at.heads.kv_heads * at.heads.group
                if ("pages", at.window) not in made:
                    made["pages", at.window] = PagedDecode(cache, size, q_heads, at.scale, at.window, static=True)
        return made

    def _set(self, inputs: Tensor, tokens: Sequence[int], past: Sequence[int]) -> None:
        inputs[:, : len(tokens)] = torch.tensor([list(tokens), list(past)])
        inputs[:, len(tokens) :] = 0

    def _all_agree(self, good: bool) -> bool:
        """Whether every rank could: they all go on alike."""
        group = self.model.group
        if group.size == 1:
            return good
        return bool(group.all_gather(torch.tensor([good], device=group.device), 0).all())


def _lengths(past: Sequence[int], size: int) -> list[int]:
    return [held + 1 for held in past] + [1] * (size - len(past))
