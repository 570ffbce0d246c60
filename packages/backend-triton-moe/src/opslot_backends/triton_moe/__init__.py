"""opslot kernels in Triton for training mixtures of experts, for CUDA and ROCm.

This file is data: importing it imports neither torch nor triton.
"""

from opslot import Backend, KernelSpec, Priority, Requires

# The module, not a distribution: torch for ROCm brings its Triton under another name.
_REQUIRES = Requires(devices=("cuda", "rocm"), archs=("sm_80..", "gfx*"), modules=("triton",))


def _kernel(
    contract: str,
    target: str,
    summary: str,
    *,
    priority: Priority = Priority.BY_NAME,
    measured: str = "",
    batch_invariant: bool = False,
) -> KernelSpec:
    """`target` is "module:function" here."""
    op, _, variant = contract.partition("/")
    return KernelSpec(
        op=op,
        variant=variant,
        name="triton",
        target=f"opslot_backends.triton_moe.{target}",
        requires=_REQUIRES,
        dtypes=("float32", "bfloat16", "float16"),
        compile=True,
        cuda_graphs=True,
        deterministic=True,
        batch_invariant=batch_invariant,
        priority=priority,
        measured=measured,
        summary=summary,
    )


_EXPERTS = "sorted on the device, gather and activation within the first product; keeps gate and up for backward"

BACKEND = Backend(
    api=1,
    kernels=(_kernel("moe_experts/standard", "moe_experts:moe_experts", _EXPERTS),),
)
