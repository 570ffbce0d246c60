"""opslot kernels from liger-kernel, for CUDA and ROCm.

This file is data: importing it imports neither torch nor liger-kernel.
"""

from opslot import Backend, KernelSpec, Priority, Requires

_REQUIRES = Requires(devices=("cuda", "rocm"), packages=("liger-kernel>=0.8.5,<0.8.6",))


def _kernel(
    contract: str,
    target: str,
    summary: str,
    *,
    nested: str = "implementation",
    priority: Priority = Priority.TUNED,
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
    rms_error: tuple[tuple[str, float], ...] = (),
    plain: bool = True,
) -> KernelSpec:
    """`target` is "module:function" here, `nested` a function beside it; `plain` is no atomics and no waiting."""
    op, _, variant = contract.partition("/")
    module, _, _ = target.partition(":")
    return KernelSpec(
        op=op,
        variant=variant,
        name="liger",
        aliases=("liger_kernel",),
        target=f"opslot_backends.liger.{target}",
        nested=f"opslot_backends.liger.{module}:{nested}",
        requires=_REQUIRES,
        dtypes=dtypes,
        compile=plain,
        cuda_graphs=plain,
        deterministic=plain,
        rms_error=rms_error,
        priority=priority,
        measured="docs/results/2026-11-30-h200-with-liger-bench.json" if priority is Priority.TUNED else "",
        summary=summary,
    )


_NORM = "a row in one block; keeps x and one number a row for backward"
_ROTATION = "queries and keys of a token at once, into copies; refuses tables whose halves differ"
_GLU = "keeps gate and up, and writes their gradients over them where nobody else can see it"
_LOSS = "head and loss over chunks of tokens, whose logits become their gradients in one pass"

BACKEND = Backend(
    api=1,
    kernels=(
        _kernel("cross_entropy_loss/causal", "cross_entropy_loss:causal", _LOSS),
        # Chunks and sums in float32 only pay for a vocabulary.
        _kernel(
            "cross_entropy_loss/token_cls",
            "cross_entropy_loss:token_cls",
            f"{_LOSS}; slower than eager for a few classes",
            priority=Priority.BY_NAME,
        ),
        _kernel("glu/geglu_tanh", "glu:geglu_tanh", _GLU, nested="geglu_implementation"),
        # Triton's sigmoid is a fast one: docs/results/2026-11-30-h200-liger-swiglu-float32.json.
        _kernel("glu/swiglu", "glu:swiglu", _GLU, nested="swiglu_implementation", rms_error=(("float32", 1.2),)),
        _kernel(
            "moe_experts/standard",
            "moe_experts:moe_experts",
            "gather and activation within the first product; its products in float32 would be TF32",
            priority=Priority.BY_NAME,
            dtypes=("bfloat16", "float16"),
            plain=False,
        ),
        _kernel("rms_norm/standard", "rms_norm:rms_norm", _NORM),
        _kernel("rms_norm/fp32_weight", "rms_norm:rms_norm_fp32_weight", _NORM),
        _kernel("rms_norm/zero_centered", "rms_norm:rms_norm_zero_centered", _NORM),
        _kernel("rms_norm/unweighted", "rms_norm:rms_norm_unweighted", f"{_NORM}; rounded once"),
        _kernel("rms_norm/unweighted_fp32", "rms_norm:rms_norm_unweighted", _NORM),
        _kernel("rotary_pos_emb/full", "rotary_pos_emb:rotary_pos_emb", _ROTATION),
        _kernel("rotary_pos_emb/partial", "rotary_pos_emb:rotary_pos_emb_partial", _ROTATION),
        _kernel("rotary_pos_emb/half_table", "rotary_pos_emb:rotary_pos_emb_half_table", _ROTATION.partition(";")[0]),
    ),
)
