"""N ranks in lockstep in one process."""

import contextvars
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.parallel.group import Group, PeerLostError, SoloGroup, sum_in_rank_order

T = TypeVar("T")


class LocalGroup(Group):
    """A rank that is a thread of this process. Made by `LocalGroup.run`.

    Ranks take turns: the one that holds the baton runs until it reaches a collective, parks there and passes
    the baton on; the last to arrive carries the collective out. So the same program always interleaves the
    same way, and no two ranks ever run at once (torch's global random generator is one for all of them).
    """

    __slots__ = ("_room",)

    def __init__(self, rank: int, room: "_Room", device: torch.device | str) -> None:
        super().__init__(rank, room.size, device)
        self._room = room

    @staticmethod
    def run(size: int, fn: Callable[[Group], T], device: torch.device | str = "cpu") -> list[T]:
        """Call `fn(group)` as each of `size` ranks and return their results in rank order.

        Ranks see the caller's gradient and inference modes and context variables. If one raises, the others
        are released from whatever collective they wait in with a `PeerLostError`, and the exception of the
        first rank that failed is raised here, with a note that names the rank.
        """
        if size < 1:
            raise OddrankError(f"A group has at least one rank, and {size} were asked for.")
        if size == 1:
            return [fn(SoloGroup(device))]
        room = _Room(size)
        results: list[Any] = [None] * size
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def body(group: LocalGroup) -> None:
            room.enter(group.rank)
            try:
                with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
                    results[group.rank] = fn(group)
            except BaseException as error:
                room.fail(group.rank, error)
            finally:
                room.leave(group.rank)

        threads = []
        for rank in range(size):
            context = contextvars.copy_context()
            group = LocalGroup(rank, room, device)
            threads.append(threading.Thread(target=context.run, args=(body, group), name=f"rank {rank}"))
        for thread in threads:
            thread.start()
        try:
            room.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: the ranks stop at their next collective
            room.fail(None, error)
            for thread in threads:
                thread.join()
            raise
        room.raise_failure()
        return results

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts.all_reduce += 1
        key = ("all_reduce", tensor.dtype, tuple(tensor.shape))
        self._room.meet(self.rank, key, tensor, _reduce)
        return tensor

    def all_gather_list(self, tensor: Tensor) -> list[Tensor]:
        self.counts.all_gather += 1
        parts: list[Tensor] = self._room.meet(self.rank, ("all_gather", tensor.dtype), tensor, list)
        # Copies, as every other group gives: one rank's later in-place work is no business of the others.
        return [part.clone() for part in parts]

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        self.counts.broadcast += 1
        if not 0 <= source < self.size:
            raise OddrankError(f"There is no rank {source} to broadcast from: the group has {self.size}.")
        data = pickle.dumps(value) if self.rank == source else b""
        values = self._room.meet(self.rank, ("broadcast", source), data, copy.copy)
        return pickle.loads(values[source])

    def barrier(self) -> None:
        self.counts.barrier += 1
        self._room.meet(self.rank, ("barrier",), None, copy.copy)


def _reduce(tensors: list[Tensor]) -> None:
    total = sum_in_rank_order(tensors, torch.empty_like(tensors[0]))
    for tensor in tensors:
        tensor.copy_(total)


class _Room:
    """Where the ranks meet: the baton, the pending collective, and the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        # A rank's turn is a lock that is held except for the moment the baton is handed to it.
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()
        self._done = [False] * size
        self._waiting: dict[int, tuple[Any, ...]] = {}
        self._values: list[Any] = [None] * size
        self._result: Any = None
        self._failure: tuple[int | None, BaseException] | None = None

    def start(self) -> None:
        self._turns[0].release()

    def enter(self, rank: int) -> None:
        self._turns[rank].acquire()

    def leave(self, rank: int) -> None:
        self._done[rank] = True
        if self._waiting and self._failure is None:
            waiting, key = next(iter(self._waiting.items()))
            message = f"Rank {rank} returned while rank {waiting} waits in {_words(key)}."
            self.fail(rank, OddrankError(message))
        self._pass_on(rank)

    def fail(self, rank: int | None, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (rank, error)

    def raise_failure(self) -> None:
        if self._failure is None:
            return
        rank, error = self._failure
        self._failure = None
        error.add_note(f"on rank {rank} of {self.size}")
        try:
            raise error
        finally:
            del error  # or this frame and the exception would keep each other, and the tensors, alive

    def meet(self, rank: int, key: tuple[Any, ...], value: Any, act: Callable[[list[Any]], Any]) -> Any:
        self._check(rank, key)
        self._values[rank] = value
        if len(self._waiting) == self.size - 1:
            self._waiting.clear()
            self._result = act(self._values)
            self._values = [None] * self.size
            return self._result
        self._waiting[rank] = key
        self._pass_on(rank)
        self._turns[rank].acquire()
        if rank in self._waiting:  # woken by a failure: a collective that took place has cleared it
            del self._waiting[rank]
            self._raise_released(rank)
        return self._result

    def _check(self, rank: int, key: tuple[Any, ...]) -> None:
        if self._failure is not None:
            self._raise_released(rank)
        if any(self._done):
            gone = self._done.index(True)
            error = OddrankError(f"Rank {rank} calls {_words(key)} after rank {gone} has returned.")
            self.fail(rank, error)
            raise error
        for other, pending in self._waiting.items():
            if pending != key:
                error = OddrankError(
                    f"Ranks called different collectives: rank {other} waits in {_words(pending)}, "
                    f"rank {rank} calls {_words(key)}. Every rank must call the same ones in the same order."
                )
                self.fail(rank, error)
                raise error

    def _raise_released(self, rank: int) -> None:
        assert self._failure is not None
        failed, error = self._failure
        who = "the caller was interrupted" if failed is None else f"rank {failed} failed"
        raise PeerLostError(f"Rank {rank} was released from a collective because {who}: {error}")

    def _pass_on(self, rank: int) -> None:
        """Hand the baton to the next rank that can run: after a failure, any that has not returned yet."""
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if not self._done[other] and (other not in self._waiting or self._failure is not None):
                self._turns[other].release()
                return


def _words(key: tuple[Any, ...]) -> str:
    return f"{key[0]}({', '.join(str(part) for part in key[1:])})"
