"""A function on every rank of a job, each in a process of its own."""

import contextlib
import queue
import socket

import pytest
import torch


def run_ranks(work, world, folder, *more):
    """Call work(rank, port, folder, results, *more) on every rank; each puts its rank into `results` when done."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=work, args=(rank, port, str(folder), results, *more)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            _wait(results, processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def _wait(results, processes):
    """For one rank to finish; when one fails, the other waits in a collective, and nobody need wait for that."""
    for _ in range(240):
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1)
        if any(process.exitcode not in (None, 0) for process in processes):
            for process in processes:
                process.kill()
            pytest.fail("a rank failed, see above")
    return pytest.fail("the ranks hang")
