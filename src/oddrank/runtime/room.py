"""How much KV cache a loaded rank has room for, from what it holds; `oddrank.layout.capacity` predicts it."""

import contextlib
import os
from pathlib import Path

import torch

from oddrank.layout.capacity import GIB, RESERVE, Room
from oddrank.layout.plan import Plan
from oddrank.runtime.experts import device_nbytes
from oddrank.runtime.models import Llama
from oddrank.runtime.parallel.group import Group

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def measure_room(model: Llama, plan: Plan, group: Group) -> Room:
    """Of this rank, with its weights loaded. Its memory is what the plan says (--rank-memory), else the device's; ranks
    on CPUs have an equal part of the machine's."""
    cache = model.new_cache(1)
    token = cache.layers * 2 * cache.kv_heads * cache.head_dim * cache.dtype.itemsize
    state = 0 if cache.states is None else cache.states.nbytes()
    memory = int(plan.shares[group.rank] * GIB) if plan.shares else _memory(group)
    return Room(memory, device_nbytes(model), token, state)


def _memory(group: Group) -> int:
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no limit
        whole = min(whole, int(_CGROUP.read_text()))
    return whole // group.size


def tokens_of_all(room: Room, group: Group) -> int | None:
    """Tokens that fit on every rank of the group; None where no rank keeps a cache. All ranks call this together."""
    mine = room.tokens()
    told = group.all_gather_list(torch.tensor([-1 if mine is None else mine], device=group.device))
    return min((n for n in (int(t) for t in told) if n >= 0), default=None)


def describe(room: Room, together: int | None) -> str:
    """One line for a rank's log."""
    mib = 1 << 20
    text = f"holds {room.weights / mib:.1f} MiB of {room.memory / GIB:.1f} GiB; "
    if room.state:
        text += f"{room.state / mib:.2f} MiB a sequence, "
    if not room.token:
        return text + "no KV cache"
    mine = room.tokens()
    text += f"{room.token} bytes of KV cache a token: room for {mine} tokens with {RESERVE:.0%} kept back"
    return text if together is None or together == mine else f"{text}, {together} on every rank"
