"""Probe: is each chosen kernel right here, on this device, before anything is bound?"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ._attempt import Failure, attempt
from ._contract import OpContract
from ._device import Device
from ._errors import BindError
from ._registry import Registry
from ._slot import OpSlot

if TYPE_CHECKING:
    import torch

    from .testing._subject import Subject


def probe(
    wanted: Iterable[tuple[str, OpContract, OpSlot, tuple[str, ...]]],
    model: torch.nn.Module,
    judged: Device,
    registry: Registry,
) -> None:
    """Compare values and gradients of each kernel with its contract's reference, on the device that it is bound for.

    `wanted` are module, contract, bound slot and the dtypes of the module's parameters. Each kernel runs once a dtype,
    on the contract's samples, against the reference in float64 on the CPU. Raises `BindError` for the first that
    differs or raises, and when the device is not here.
    """
    import torch

    from .testing._subject import Subject

    device = _torch_device(model, judged, registry)
    fallback = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    done = set()
    for module, contract, slot, dtypes in wanted:
        offer, kernel = slot.offer, slot.kernel
        assert offer is not None
        assert kernel is not None
        for dtype in dtypes or (str(fallback).removeprefix("torch."),):
            if (offer, dtype) in done or dtype not in contract.tolerances:
                continue
            done.add((offer, dtype))
            subject = Subject(contract, offer.selector, kernel, offer.spec, device, getattr(torch, dtype))
            with torch.inference_mode(False), torch.enable_grad():
                outcome = attempt(partial(_check, subject))
            if isinstance(outcome, Failure):
                found = isinstance(outcome.error, AssertionError) and str(outcome.error)
                raise BindError(
                    f"{module or type(model).__name__}: kernel {offer.selector} for {contract} failed its probe, so "
                    f"nothing was bound: {found or outcome}. Choose {contract.op}: eager, or do without the probe; "
                    f"`opslot verify {contract} --kernel {offer.spec.name}` says more"
                ) from outcome.error


def _check(subject: Subject) -> None:
    for case in subject.cases(0):
        with case.noted():
            run = case.run()
            case.assert_outputs(run)
            if case.has_gradients:
                _, incoming = next(case.incoming(case.eager.outputs))
                case.assert_gradients(run, incoming, "probed")


def _torch_device(model: torch.nn.Module, judged: Device, registry: Registry) -> torch.device:
    import torch

    candidates = [p.device for p in islice(model.parameters(), 1) if p.device.type != "meta"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    candidates += [accelerator] if accelerator is not None else []
    for device in (*candidates, torch.device("cpu")):
        if registry.describe(device) == judged:
            return device
    raise BindError(f"a probe runs the kernels, and {judged} is not here: bind without it, or on that machine")
