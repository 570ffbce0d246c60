"""What a guard adds to a call, in nanoseconds: minimum of 9 repeats, with kernels that do nothing.

Each figure is the call of a guarded method minus the call of the same method without the guard. Every module is an
`nn.Module`. The floor of a guard is one read of an attribute of an `nn.Module`, whose `__getattr__` keeps CPython from
specialising it. What the experts wrapper passes on are plain attributes: parameters go through `nn.Module.__getattr__`
with and without the wrapper, in times longer and more scattered than the wrapper's own.
"""

import argparse
import json
import platform
import timeit
from datetime import date
from pathlib import Path

import torch
from opslot import Backend, KernelSpec, OpContract, OpSlot, Registry, Tolerance, bind, guard_forward
from opslot._device import CORE_KINDS

REPEATS, NUMBER = 9, 200_000


def nothing(x: object) -> None:
    return None


def no_experts(x: object, index: object, weights: object, gate_up: object, down: object) -> None:
    return None


class Bare(torch.nn.Module):
    def forward(self, x: object) -> None:
        return nothing(x)


class Reading(torch.nn.Module):
    attribute = object()

    def forward(self, x: object) -> None:
        self.attribute  # noqa: B018
        return nothing(x)


class Guarded(torch.nn.Module):
    nothing_op = OpSlot("nothing", "standard")

    def forward(self, x: object) -> None:
        kernel = self.nothing_op.kernel
        if kernel is not None:
            return kernel(x)
        return nothing(x)


class Experts(torch.nn.Module):
    no_experts_op = OpSlot("no_experts", "standard")

    def __init__(self) -> None:
        super().__init__()
        # Past nn.Module's own __setattr__, so that they are plain attributes.
        vars(self).update({name: torch.nn.Parameter(torch.zeros(1)) for name in ("gate_up_proj", "down_proj")})

    def forward(self, x: object, index: object, weights: object) -> None:
        return no_experts(x, index, weights, self.gate_up_proj, self.down_proj)


@guard_forward("no_experts_op", "gate_up_proj", "down_proj")
class GuardedExperts(Experts):
    pass


def measure() -> dict[str, float]:
    """Nanoseconds per call. The candidates take turns, so that a slow spell of the machine hits all of them."""
    registry = _registry()
    bound, bound_experts = Guarded(), GuardedExperts()
    bind(bound, {"nothing": "nothing"}, device="cpu", registry=registry)
    bind(bound_experts, {"no_experts": "nothing"}, device="cpu", registry=registry)
    calls = {
        "bare": (Bare().forward, (None,)),
        "reading": (Reading().forward, (None,)),
        "unbound": (Guarded().forward, (None,)),
        "bound": (bound.forward, (None,)),
        "experts_bare": (Experts().forward, (None, None, None)),
        "experts_bound": (bound_experts.forward, (None, None, None)),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(REPEATS):
        for name, (function, arguments) in calls.items():
            timer = timeit.Timer("function(*arguments)", globals={"function": function, "arguments": arguments})
            best[name] = min(best[name], timer.timeit(NUMBER) / NUMBER * 1e9)
    return best


def _registry() -> Registry:
    registry = Registry()
    contracts = tuple(
        OpContract(
            op=function.__name__,
            variant="standard",
            summary="does nothing",
            reference=function,
            samples=nothing,
            tolerances={"float32": Tolerance(0, 0)},
        )
        for function in (nothing, no_experts)
    )
    kernels = tuple(KernelSpec(op=f.__name__, name="nothing", target=f) for f in (nothing, no_experts))
    registry.add(Backend(api=1, contracts=contracts, kernels=kernels, device_kinds=CORE_KINDS), "benchmark")
    return registry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    cost = measure()
    figures = {
        "unbound_ns": cost["unbound"] - cost["bare"],
        "bound_ns": cost["bound"] - cost["bare"],
        "experts_wrapper_ns": cost["experts_bound"] - cost["experts_bare"],
        "floor_attribute_read_ns": cost["reading"] - cost["bare"],
        "bare_call_ns": cost["bare"],
        "bare_experts_call_ns": cost["experts_bare"],
    }
    for name, value in figures.items():
        print(f"{name:24} {value:7.1f}")
    if options.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.processor()}
        data = {
            "command": "python benchmarks/guard_cost.py --json FILE",
            "date": date.today().isoformat(),
            "machine": machine,
            "figures": figures,
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
