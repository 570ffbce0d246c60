"""What the adapters share: what Liger's launchers take, and which memory they may write to."""

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from opslot import KernelUnavailable
from torch import Tensor

# Liger holds a row in one block of at most this many elements.
_LONGEST_ROW = 65536


def refuse_long_rows(size: int, what: str) -> None:
    if size > _LONGEST_ROW:
        raise KernelUnavailable(f"{what}: liger takes rows of up to {_LONGEST_ROW} elements, got {size}: choose eager")


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """For launchers of Liger's that leave the device to the caller: Triton launches on the current one.

    In backward, autograd has made it the right one.
    """
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


def writable(saved: list[Tensor]) -> list[Tensor]:
    """The saved tensors, copied where anybody else could still see what is written into them.

    Liger's backward of a gated activation writes the gradients over its saved inputs. Nobody notices as long as the
    graph is about to be freed and the memory is the graph's alone, as it is between two projections. It is not with
    `retain_graph=True`, or when a variable, a view, a hook or another saved tensor shares the memory.
    """
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    for i in range(len(saved)):
        if kept or not _alone(saved, i):
            saved[i] = saved[i].clone(memory_format=torch.contiguous_format)
    return saved


def _alone(held: list[Tensor], i: int) -> bool:
    """Whether nobody but the list and the graph refers to a tensor, to what it is a view of, or to their memory."""
    if not held[i]._is_view():
        return _referred_once(held, i, owners=1)
    base = [held[i]._base]
    return _referred_once(held, i, owners=2) and base[0] is not None and _referred_once(base, 0, owners=2)


def _referred_once(held: list[Any], i: int, owners: int) -> bool:
    # Counts above these mean another owner. Were torch to count anything more, all would be copied: slower, not wrong.
    # The tensor has one reference from Python and one from the graph, and then one to its object from itself; that
    # object one from the list and one from getrefcount; the memory one from each tensor and one from its object in
    # Python, which is one and the same for all who ask, and has one from the memory, `storage` and getrefcount each.
    count, storage = held[i]._use_count(), held[i].untyped_storage()
    return (
        count <= 2
        and sys.getrefcount(held[i]) <= 2 + (count > 1)
        and sys.getrefcount(storage) <= 3
        # Memory from elsewhere (NumPy, CuPy, DLPack) has owners that torch does not count.
        and storage.resizable()
        and torch._C._storage_Use_Count(storage._cdata) <= owners + 1
    )
