"""Ranks that compare their kernels: they agree, or all of them raise and none hangs."""

import socket
import time

import pytest
import torch
import torch.distributed as dist
from opslot import Backend, BindError, KernelSpec, OpContract, OpsConfig, OpSlot, Registry, bind
from opslot._device import CORE_KINDS


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Scale(torch.nn.Module):
    scale_op = OpSlot("scale")


def made(choice, origin):
    """What one rank bound; the ranks are processes of their own, so each makes its own registry."""
    known = Registry()
    contract = OpContract(
        op="scale", variant="standard", summary="twice", reference=scale, samples=scale, tolerances={}
    )
    kernels = (KernelSpec(op="scale", name="fast", target=scale), KernelSpec(op="scale", name="slow", target=scale))
    known.add(Backend(api=1, contracts=(contract,), kernels=kernels, device_kinds=CORE_KINDS), "acme", "2.0")
    return bind(Scale(), OpsConfig(choices={"scale": choice}, origin=origin), device="cpu", registry=known)


def raised(binding, timeout):
    try:
        binding.assert_same_on_all_ranks(timeout=timeout)
    except BindError as error:
        return str(error)
    return ""


def meetings(rank):
    """One process group goes through every meeting that leaves its ranks alive."""
    fast = made("fast", "code")
    yield raised(fast, 60)  # agree
    yield raised(fast, 60)  # agree again
    time.sleep(2 if rank == 1 else 0)
    yield raised(fast, 60)  # one late, but in time
    yield raised(made("slow" if rank == 1 else "fast", f"variable OPSLOT_OPS of rank {rank}"), 60)
    if rank == 1:
        fast.unbind()
    yield raised(fast, 60)  # one runs something else than it bound
    fast.apply()
    time.sleep(8 if rank == 2 else 0)
    yield raised(fast, 3)  # one too late
    dist.barrier()
    time.sleep(8 if rank == 0 else 0)
    yield raised(fast, 3)  # the one that proposes the verdict too late
    dist.barrier()
    yield raised(fast, 60)  # they meet again
    if rank == 1:
        try:
            made("nothing", "code")
        except ValueError as error:
            yield str(error)  # and stays alive, as under torchrun, which ends it when it notices
    else:
        yield raised(fast, 3)
    dist.barrier()
    yield raised(fast, 3) if rank == 0 else ""  # one calls once more than the others
    dist.barrier()


def meetings_on_gpus(rank):
    """Under NCCL, whose collectives would want tensors on the device, and wait for ever."""
    torch.cuda.set_device(rank)
    dist.all_reduce(torch.ones(1, device="cuda"))
    yield raised(made("fast", "code"), 60)
    yield raised(made("slow" if rank else "fast", "code"), 60)
    time.sleep(8 if rank else 0)
    yield raised(made("fast", "code"), 3)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()  # rank 0 has the store, and must not leave before


def the_rank_with_the_store_is_gone(rank):
    dist.barrier()
    if rank == 0:
        yield "gone"
        return
    time.sleep(2)
    yield raised(made("fast", "code"), 5)


def work(rank, world, port, scenario, results):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if scenario == "meetings_on_gpus" else "gloo", store=store, rank=rank, world_size=world
    )
    results.put((rank, list(globals()[scenario](rank))))


def run(scenario, world):
    """What each rank says to each meeting of the scenario."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=work, args=(r, world, port, scenario, results)) for r in range(world)]
    for process in processes:
        process.start()
    try:
        by_rank = dict(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            alive = process.is_alive()
            process.kill()
            assert not alive, "a rank hangs"
    return [by_rank[rank] for rank in range(world)]


@pytest.mark.slow
def test_three_ranks_agree_or_all_of_them_raise():
    for rank, said in enumerate(run("meetings", 3)):
        agree, again, late, differ, unbound, too_late, without_0, afterwards, failed, once_more = said
        assert [agree, again, late, afterwards] == [""] * 4
        assert "the ranks chose different kernels" in differ
        assert "ranks 0,2: choice" in differ
        assert (
            "scale/standard: fast acme 2.0  [asked for: scale in variable OPSLOT_OPS of rank 0]  (the model)  code:"
            in differ
        )
        assert "scale/standard: slow acme 2.0  [asked for: scale in variable OPSLOT_OPS of rank 1]" in differ
        assert "1 slot changed since on cpu" in unbound
        assert "rank 2 of 3 did not arrive in time (3 s)" in too_late
        assert "rank 0 of 3 did not arrive in time (3 s)" in without_0
        assert ("no kernel 'nothing'" if rank == 1 else "rank 1 of 3 did not arrive in time (3 s)") in failed
        assert once_more == "" if rank else "ranks 1-2 of 3 did not arrive in time (3 s)" in once_more


@pytest.mark.slow
def test_the_store_goes_with_its_rank_and_the_others_raise():
    _, *others = run("the_rank_with_the_store_is_gone", 3)
    for said in others:
        assert "could not compare its kernels with the others" in said[0]


@pytest.mark.gpu
def test_ranks_of_an_nccl_group():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for agree, differ, too_late in run("meetings_on_gpus", 2):
        assert agree == ""
        assert "the ranks chose different kernels" in differ
        assert "rank 1 of 2 did not arrive in time (3 s)" in too_late


def test_without_a_process_group_there_is_nothing_to_compare():
    made("fast", "code").assert_same_on_all_ranks()
