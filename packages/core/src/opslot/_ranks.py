"""Ranks: the processes of one job agree on what they bound, or all of them raise."""

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ._errors import BindError
from ._report import collapse, counted, grouped, kernel_text

if TYPE_CHECKING:
    from ._binding import Binding


_GRACE = timedelta(seconds=10)


def assert_same(binding: "Binding", timeout: float) -> None:
    """See `Binding.assert_same_on_all_ranks`.

    Through the process group's key-value store: a collective would hang when a rank stays away, needs tensors on the
    device of the group, and cannot say who is missing.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    assert dist.group.WORLD is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        store = dist.PrefixStore("opslot", dist.group.WORLD.get_group_store())  # type: ignore[attr-defined]
        verdict, details = _meet(store, rank, world, binding, timedelta(seconds=timeout))
    except dist.DistError as error:
        raise BindError(
            f"rank {rank} could not compare its kernels with the others, the process group's store is gone: {error}"
        ) from error
    if verdict["missing"]:
        raise BindError(
            f"{_text(verdict['missing'])} of {world} did not arrive in time ({timeout:g} s) to compare their "
            "kernels. Did their bind raise, or do they call assert_same_on_all_ranks less often? See their output, or "
            "give more time with timeout="
        )
    if len(verdict["choices"]) > 1:
        lines = [f"  {_text(verdict['choices'][choice])}: {detail}" for choice, detail in details.items()]
        raise BindError(
            "the ranks chose different kernels; their configuration, environment variables, installed backends or "
            "devices differ:\n" + "\n".join(lines)
        )


def _meet(
    store: Any, rank: int, world: int, binding: "Binding", timeout: timedelta
) -> tuple[dict[str, Any], dict[str, str]]:
    """The verdict, and what was chosen by the ranks of each choice where there is more than one.

    Every rank writes its choice. Rank 0 waits for all of them and proposes the verdict; one that waited in vain for it
    proposes that ranks are missing. The store takes the first proposal alone, so that all ranks read the same one, also
    a rank that arrives afterwards.
    """
    import torch.distributed as dist

    meeting = store.add(f"calls/{rank}", 1)  # counted in the store, since a rank may come twice
    keys = [f"{meeting}/{other}" for other in range(world)]
    store.set(f"{keys[rank]}/detail", _detail(binding))
    store.set(keys[rank], _choice(binding))
    verdict = f"{meeting}/verdict"
    try:
        store.wait(keys if rank == 0 else [verdict], timeout)
    except dist.DistStoreError:  # raised for the timeout, and for a lost store, which the next line finds
        store.num_keys()
    if rank == 0 or not store.check([verdict]):
        store.compare_set(verdict, "", json.dumps(_judge(store, keys)))
    judged = json.loads(store.get(verdict))
    choices = judged["choices"]
    details = {choice: store.get(f"{keys[ranks[0]]}/detail").decode() for choice, ranks in choices.items()}
    if len(choices) != 1:
        store.set(f"{keys[rank]}/read", "")
        if rank == 0:  # whose process often holds the store: stay until the others know why they will raise
            with suppress(dist.DistStoreError):
                store.wait([f"{key}/read" for key in keys if store.check([key])], _GRACE)
    return judged, details


def _judge(store: Any, keys: Sequence[str]) -> dict[str, Any]:
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    choices: dict[str, list[int]] = {}
    if not missing:
        for rank, choice in enumerate(store.multi_get(list(keys))):
            choices.setdefault(choice.decode(), []).append(rank)
    return {"missing": missing, "choices": choices}


def _choice(binding: "Binding") -> str:
    """What a rank runs now: its choice, or that this no longer holds."""
    changed = len(binding.verify())
    return f"{binding.fingerprint}, {counted(changed, 'slot')} changed since" if changed else binding.fingerprint


def _detail(binding: "Binding") -> str:
    """What a rank chose and why: the reasons name the field or variable that differs, the sources an edited kernel."""
    sources = {
        (f"{row.op}/{row.variant}", kernel_text(row)): f"  {row.source[:23]}" for row in binding.rows if row.source
    }
    lines = [f"choice {_choice(binding)} on {binding.device}"]
    for (op, kernel, reason), modules in grouped(binding.rows).items():
        lines.append(f"    {op}: {kernel}  [{reason}]  {', '.join(collapse(modules))}{sources.get((op, kernel), '')}")
    return "\n".join(lines)


def _text(ranks: Sequence[int]) -> str:
    numbers = collapse([str(rank) for rank in ranks])[0].strip("{}")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
