"""The threads that compute experts: results in order, errors told, a dead pool reported and never waited for."""

import ctypes
import gc
import threading
import time

import pytest
import torch
from runtime.experts.stacks import DENSE, experts, options, routing, stack

from oddrank import OddrankError
from oddrank.runtime.experts.pool import ExpertPool
from oddrank.runtime.topology import own_cores


@pytest.fixture
def pool():
    made = ExpertPool(own_cores(2) * 2)
    yield made
    made.close()


def kill(thread):
    """End a thread from outside, as nothing should."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def test_results_come_in_order_whichever_ends_first(pool):
    def one(i):
        time.sleep(0.02 * (3 - i))
        return i

    assert pool.map([lambda i=i: one(i) for i in range(4)]) == [0, 1, 2, 3]


def test_work_runs_on_one_thread_of_torch_and_later_threads_are_not_affected(pool):
    torch.set_num_threads(2)
    try:
        made = ExpertPool(own_cores(1))
        assert made.map([torch.get_num_threads]) == [1]
        found = []
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [2]
        assert torch.get_num_threads() == 2
        made.close()
    finally:
        torch.set_num_threads(1)


def test_work_runs_in_the_callers_inference_mode(pool):
    with torch.inference_mode():
        job = pool.start(torch.is_inference_mode_enabled)
    assert job.result() is True
    with torch.inference_mode(False):
        assert pool.start(torch.is_inference_mode_enabled).result() is False


def test_what_the_work_raises_is_raised_by_result(pool):
    def fail():
        raise ValueError("no such expert")

    def late():
        raise TimeoutError("its own")

    with pytest.raises(ValueError, match="no such expert"):
        pool.start(fail).result()
    with pytest.raises(TimeoutError, match="its own"):
        pool.start(late).result()
    assert pool.map([lambda: 1]) == [1]


def test_threads_that_end_are_reported_to_who_waits():
    pool = ExpertPool(own_cores(1))
    pool.map([lambda: 1])
    kill(pool._threads[0])  # idle now: it dies of it as it takes the next work, which is lost
    job = pool.start(lambda: 1)
    start = time.perf_counter()
    with pytest.raises(OddrankError, match=r"threads that compute this rank's experts cannot go on \(ended"):
        job.result()
    assert time.perf_counter() - start < 5
    with pytest.raises(OddrankError, match="cannot go on"):
        pool.start(lambda: 1)


def test_a_closed_pool_says_so_and_so_does_the_layer_that_needs_it():
    layer = experts(stack(DENSE), (0, 64), options("cpu"))
    batch = routing(2).tensors(torch.float64)  # which the threads compute
    layer(*batch)
    layer.share.close()
    with pytest.raises(OddrankError, match="cannot go on"):
        layer(*batch)


def test_a_pool_whose_threads_cannot_start_says_why(monkeypatch):
    def fail():
        raise RuntimeError("no memory for a thread")

    monkeypatch.setattr("oddrank.runtime.experts.pool._compute_alone", fail)
    pool = ExpertPool(own_cores(1))
    with pytest.raises(OddrankError, match="cannot go on"):
        pool.start(lambda: 1).result()


def test_no_threads_are_refused():
    with pytest.raises(OddrankError, match="at least one thread"):
        ExpertPool([])


def test_the_threads_of_a_forgotten_pool_end():
    pool = ExpertPool(own_cores(1))
    pool.map([lambda: 1])
    threads = pool._threads
    del pool
    gc.collect()
    threads[0].join(10)
    assert not threads[0].is_alive()
