"""The device's cache of experts: least recently used out first, counted, and never read before it is filled."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from runtime.experts.stacks import DENSE, E, error, expected, experts, options, routing, stack

from oddrank.runtime.experts.cache import ExpertCache, Stream

CPU = torch.device("cpu")


class HandCopier:
    """Copies nothing before it is told to, or waited for; and in order."""

    def __init__(self):
        self.started = []
        self.done = 0

    def start(self, pairs):
        self.started.append(pairs)
        number = len(self.started)
        return lambda: self.run(number)

    def run(self, number):
        while self.done < number:
            for source, target in self.started[self.done]:
                for suffix, tensor in target.items():
                    tensor.copy_(source[suffix])
            self.done += 1


class LateCopier:
    """A thread that copies, in order, a while after it was asked: who does not wait reads what was there before."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)

    def start(self, pairs):
        def copy():
            time.sleep(0.001)
            for source, target in pairs:
                for suffix, tensor in target.items():
                    tensor.copy_(source[suffix])

        return self.thread.submit(copy).result


@pytest.fixture(scope="module")
def banks():
    """Of one layer. Expert e's values can be told from all others'."""
    layer = experts(stack(DENSE), (0, 64), options("cpu"))
    return layer.backend._layer.banks


def is_expert(stored, banks, expert):
    wanted = banks.expert(expert)
    return all(torch.equal(part[suffix], wanted[i][suffix]) for i, part in enumerate(stored) for suffix in part)


def test_least_recently_used_goes_first(banks):
    cache = ExpertCache(banks, 3, CPU, HandCopier())
    for expert in (0, 1, 2):
        assert not cache.touch(expert)
        assert cache.admit(expert)
    assert cache.experts == [0, 1, 2]
    assert cache.touch(0)
    assert cache.experts == [1, 2, 0]
    assert cache.admit(4)
    assert cache.experts == [2, 0, 4]
    assert cache.admit(5, needed={2, 4})
    assert cache.experts == [2, 4, 5]
    assert not cache.admit(1, needed={2, 4, 5})
    assert (cache.hits, cache.misses, cache.evictions) == (1, 3, 2)
    for expert in cache.experts:
        assert is_expert(cache.get(expert), banks, expert)


def test_a_place_is_given_away_while_its_copy_is_under_way(banks):
    copier = HandCopier()
    cache = ExpertCache(banks, 1, CPU, copier)
    cache.admit(0)
    cache.admit(1)
    assert copier.done == 0
    assert is_expert(cache.get(1), banks, 1)


def test_every_get_is_what_the_expert_holds_through_many_evictions(banks):
    cache, order, rng = ExpertCache(banks, 3, CPU, LateCopier()), [], random.Random(3)
    hits = misses = 0
    for _ in range(120):
        expert = rng.randrange(E)
        found = cache.touch(expert)
        assert found == (expert in order)
        if found:
            hits += 1
            order.remove(expert)
        else:
            misses += 1
            if len(order) == 3:
                order.pop(0)
            cache.admit(expert)
        order.append(expert)
        assert is_expert(cache.get(expert), banks, expert)
        assert cache.experts == order
    assert (cache.hits, cache.misses) == (hits, misses)
    assert hits > 20 and misses > 20


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6])
def test_streamed_experts_are_whole_and_at_most_one_copy_ahead(banks, count):
    copier, order = HandCopier(), [4, 0, 5, 1, 3, 2][:count]
    seen = []
    for number, stored in enumerate(Stream(banks, CPU, copier).run(banks, order)):
        assert is_expert(stored, banks, order[number])
        # this one's place is not filled anew before it was used
        assert len(copier.started) == min(number + 2, count)
        copier.run(len(copier.started))
        assert is_expert(stored, banks, order[number])
        seen.append(number)
    assert seen == list(range(count))


def counted(layer, chosen):
    """Run a token that chooses these experts; (hits, misses, evictions) it brought."""
    cache = layer.backend.cache
    before = cache.hits, cache.misses, cache.evictions
    x = torch.from_numpy(routing(1).x).float()
    layer(x, torch.full((1, len(chosen)), 0.5), torch.tensor([chosen]))
    return tuple(b - a for a, b in zip(before, (cache.hits, cache.misses, cache.evictions), strict=True))


def test_decoding_fills_the_cache_and_evicts_only_what_the_token_does_not_need():
    layer = experts(stack(DENSE), (0, 64), options("offload", 3))
    cache = layer.backend.cache
    assert counted(layer, [0, 1]) == (0, 2, 0)
    assert counted(layer, [1, 0]) == (2, 0, 0)
    assert counted(layer, [4, 0]) == (1, 1, 0)
    assert cache.experts == [1, 0, 4]
    assert counted(layer, [5, 1]) == (1, 1, 1)  # 1 is the oldest, and needed
    assert cache.experts == [4, 1, 5]


def test_a_batch_that_needs_more_than_there_is_room_for_puts_nothing_out():
    layer = experts(stack(DENSE), (0, 64), options("offload", 3))
    cache = layer.backend.cache
    assert counted(layer, [2, 3]) == (0, 2, 0)
    assert counted(layer, [0, 1, 2, 4, 5]) == (1, 4, 0)
    assert sorted(cache.experts) == [0, 2, 3]  # one free place was filled


def test_hybrid_takes_the_heaviest_misses_into_its_cache():
    layer = experts(stack(DENSE), (0, 64), options("hybrid", 3))
    cache, x = layer.backend.cache, torch.from_numpy(routing(1).x).float()
    layer(x, torch.tensor([[0.1, 0.5, 0.4]]), torch.tensor([[0, 3, 5]]))
    assert cache.experts == [3, 5]
    layer(x, torch.tensor([[0.3, 0.2, 0.5]]), torch.tensor([[3, 5, 1]]))
    assert (cache.hits, cache.misses) == (2, 4)
    assert cache.experts == [3, 5, 1]
    layer(x, torch.tensor([[0.3, 0.7]]), torch.tensor([[5, 2]]))
    assert cache.experts == [1, 5, 2]
    layer(x, torch.tensor([[0.2, 0.3, 0.1, 0.4]]), torch.tensor([[1, 5, 2, 0]]))
    assert cache.experts == [1, 2, 5]  # all of it was needed, in the order of the experts


@pytest.mark.parametrize("backend", ["offload", "hybrid"])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_late_copies_are_waited_for(backend, slots):
    made = stack(DENSE)
    layer = experts(made, (0, 320), options(backend, slots))
    layer.share._copier = LateCopier()
    rng = np.random.default_rng(slots)
    for seed in range(8):
        r = routing(int(rng.choice([1, 2, 70])), k=int(rng.integers(1, 4)), seed=seed)
        assert error(layer(*r.tensors(torch.float64)), expected(made, *r)) < 1e-13


def test_layers_of_the_same_size_stream_through_the_same_two_buffers():
    first = experts(stack(DENSE), (0, 64), options("offload", 1))
    second = experts(stack(DENSE), (0, 64), options("offload", 1))
    other = experts(stack(DENSE), (0, 128), options("offload", 1))
    for layer in (second, other):
        layer.share = first.share
    streams = [layer.backend._stream for layer in (first, second, other)]
    assert streams[0] is streams[1] is not streams[2]
    assert streams[0].nbytes() == 2 * 2 * 3 * 64 * 160
