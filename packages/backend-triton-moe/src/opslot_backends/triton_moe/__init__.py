"""opslot kernels in Triton for training mixtures of experts, for CUDA and ROCm.

This file is data: importing it imports neither torch nor triton.
"""

from opslot import Backend, KernelSpec, Priority, Requires

# What earned each kernel its priority: beside eager code, and beside transformers' grouped_mm.
_BENCH = "docs/results/2026-11-30-h200-triton-moe-bench.json"
_BESIDE_GROUPED_MM = "docs/results/2026-11-30-h200-moe-experts.json"
_OTHERS = "docs/results/2026-11-30-h200-moe-experts-other-variants.json"
# The module, not a distribution: torch for ROCm brings its Triton under another name.
_REQUIRES = Requires(devices=("cuda", "rocm"), archs=("sm_80..", "gfx*"), modules=("triton",))


def _kernel(
    contract: str,
    target: str,
    summary: str,
    *,
    nested: str | None = None,
    measured: str,
    rms_error: tuple[tuple[str, float], ...] = (),
    batch_invariant: bool = False,
) -> KernelSpec:
    """`target` and `nested` are "module:function" here."""
    op, _, variant = contract.partition("/")
    return KernelSpec(
        op=op,
        variant=variant,
        name="triton",
        target=f"opslot_backends.triton_moe.{target}",
        nested=nested and f"opslot_backends.triton_moe.{nested}",
        requires=_REQUIRES,
        dtypes=("float32", "bfloat16", "float16"),
        compile=True,
        cuda_graphs=True,
        deterministic=True,
        batch_invariant=batch_invariant,
        rms_error=rms_error,
        priority=Priority.TUNED,
        measured=measured,
        summary=summary,
    )


def _experts(variant: str, function: str, summary: str, measured: str) -> KernelSpec:
    return _kernel(
        f"moe_experts/{variant}",
        f"moe_experts:{function}",
        summary,
        nested="_tiling:implementation",
        measured=measured,
        # Products of float32 are three of TF32, which leave out what two small parts make: 1.5 to 1.9 times eager's
        # error on an H200 (docs/results/2026-11-30-h200-triton-moe-first-failures.json).
        rms_error=(("float32", 2.5),),
    )


_BALANCE = "all layers in one launch each way, forward without a copy of them; keeps the logits, not their softmax"
_SORTED = "sorted on the device, gather and activation within the first product; keeps gate and up for backward"
_NORM = "one pass each way, a row as if it were alone; the gradient of the weight without atomic additions"
_ROTATION = "queries and keys in one launch from where they lie, in float32 and rounded once"

BACKEND = Backend(
    api=1,
    kernels=(
        _kernel(
            "load_balancing_loss/standard",
            "load_balancing_loss:load_balancing_loss",
            _BALANCE,
            measured=_BESIDE_GROUPED_MM,
            # Triton's exp is a fast one: 2.7 times eager's error, of the same result.
            rms_error=(("float32", 3.5),),
        ),
        _experts("standard", "moe_experts", _SORTED, _BESIDE_GROUPED_MM),
        _experts("clamped", "moe_experts_clamped", f"{_SORTED}; clamps there too", _OTHERS),
        _experts("gpt_oss", "moe_experts_gpt_oss", f"{_SORTED}; reads weights as gpt-oss stores them", _OTHERS),
        _kernel("rms_norm/standard", "rms_norm:rms_norm", _NORM, measured=_BENCH, batch_invariant=True),
        _kernel(
            "rotary_pos_emb/interleaved",
            "rotary_pos_emb:rotary_pos_emb_interleaved",
            _ROTATION,
            measured=_BENCH,
        ),
    ),
)
