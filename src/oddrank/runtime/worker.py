"""One rank of a running model: load the slice, then do what the launcher asks until it says stop."""

import gc
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.runtime.engine import Engine
from oddrank.runtime.experts import ExpertOptions, start_experts
from oddrank.runtime.loader import load, prepare
from oddrank.runtime.models import Llama, build_model
from oddrank.runtime.models.llama import full_logits
from oddrank.runtime.parallel.child import Link
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.precision import Precision
from oddrank.runtime.progress import load_bar
from oddrank.runtime.request import Completion, Loaded, Sampling, Timings
from oddrank.runtime.room import describe, measure_room, tokens_of_all
from oddrank.transform.slice import RankSlice

log = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True):
    """What every rank is started with. plan: `Plan.to_json`. eos: tokens that end a sequence."""

    model: str
    plan: bytes
    dtype: str
    eos: tuple[int, ...]
    slots: int
    chunk: int
    experts: ExpertOptions = ExpertOptions()


class GenerateRequest(msgspec.Struct, frozen=True):
    prompts: list[list[int]]
    sampling: Sampling
    stream: bool


class LogitsRequest(msgspec.Struct, frozen=True):
    token_ids: list[int]


class Token(msgspec.Struct, frozen=True):
    """Prompt `index` goes on with `token`."""

    index: int
    token: int


class Generated(msgspec.Struct, frozen=True):
    completions: list[Completion]
    timings: Timings


def load_rank(
    plan: Plan,
    checkpoint: Checkpoint,
    group: Group,
    precision: Precision,
    experts: ExpertOptions = ExpertOptions(),  # noqa: B008 (immutable)
) -> tuple[Llama, Loaded]:
    """Build this rank's model and copy its slice of `checkpoint` into it."""
    part = RankSlice(plan, checkpoint, group.rank)
    _refuse_false_tie(plan, checkpoint)
    model = build_model(plan.model.family, checkpoint.config, part, group, precision, experts)
    with load_bar(part, group, tuple(model.WITHOUT)) as advance:

        def read(name: str) -> None:
            checkpoint.release([name])
            advance(name)

        loaded = load(model, part, read, group.device, model.WITHOUT)
    if experts.kind == "auto":
        prepare(model)  # what is measured is what will run
    return model, msgspec.structs.replace(loaded, experts=start_experts(model))


def _refuse_false_tie(plan: Plan, checkpoint: Checkpoint) -> None:
    """OddrankError where the config ties a tensor that is stored with values of its own: transformers then keeps
    them apart, whatever the config says."""
    for role in plan.model.roles:
        other = role.tied_to
        if other is None or role.name not in checkpoint.tensors or other not in checkpoint.tensors:
            continue
        if not np.array_equal(checkpoint.array(role.name), checkpoint.array(other)):
            raise OddrankError(
                f"{role.name} is stored with other values than {other}, but config.json ties them "
                "(tie_word_embeddings). Set tie_word_embeddings to false there."
            )
        checkpoint.release([role.name, other])


def serve(group: Group, link: Link, job: Job) -> Loaded:
    """The target of a rank process. Tells the launcher `Loaded`, then answers requests; rank 0 sends the
    answers. None ends it."""
    plan = Plan.from_json(job.plan)
    precision = Precision.of(job.dtype, group.device)
    with Checkpoint.open(job.model) as checkpoint:
        model, loaded = load_rank(plan, checkpoint, group, precision, job.experts)
    room = measure_room(model, plan, group)
    together = tokens_of_all(room, group)
    rate = loaded.stored_bytes / max(loaded.seconds, 1e-9) / 1e9
    log.info("read %.1f MiB in %.1f s (%.2f GB/s)", loaded.stored_bytes / 2**20, loaded.seconds, rate)
    log.info("%s", describe(room, together))
    loaded = msgspec.structs.replace(loaded, room=room, cache_tokens=together)
    link.send(loaded)
    engine = Engine(model, job.eos, slots=job.slots, chunk=job.chunk)
    gc.collect()
    gc.freeze()  # what is here now stays: no collection during decoding looks through it
    while True:
        request = link.receive()
        if request is None:
            return loaded
        answer = _answer(engine, request, link if group.rank == 0 else None)
        if group.rank == 0:
            link.send(answer)


def _answer(engine: Engine, request: Any, line: Link | None) -> Any:
    if isinstance(request, LogitsRequest):
        return full_logits(engine.model, request.token_ids).cpu().numpy()
    assert isinstance(request, GenerateRequest)
    on_token = None
    if request.stream and line is not None:
        send = line.send

        def on_token(index: int, token: int) -> None:
            send(Token(index, token))

    return Generated(engine.generate(request.prompts, request.sampling, on_token), engine.timings)


def local_logits(
    plan: Plan,
    checkpoint: Checkpoint,
    token_ids: Sequence[int],
    dtype: str,
    experts: ExpertOptions = ExpertOptions(),  # noqa: B008 (immutable)
) -> Tensor:
    """Logits [tokens, vocab] of one sequence, all ranks in this process, in lockstep."""
    from oddrank.runtime.parallel.local import LocalGroup

    def rank(group: Group) -> Tensor:
        model, _ = load_rank(plan, checkpoint, group, Precision.of(dtype, group.device), experts)
        return full_logits(model, list(token_ids))

    with torch.inference_mode():
        return LocalGroup.run(plan.tp, rank)[0]
