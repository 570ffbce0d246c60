"""opslot kernels from liger-kernel, for CUDA and ROCm.

This file is data: importing it imports neither torch nor liger-kernel.
"""

from opslot import Backend, KernelSpec, Priority, Requires

_REQUIRES = Requires(devices=("cuda", "rocm"), packages=("liger-kernel>=0.8.5,<0.9",))
_DTYPES = ("float32", "bfloat16", "float16")


def _kernel(
    op: str, variant: str, target: str, nested: str, priority: Priority, summary: str, *, deterministic: bool = True
) -> KernelSpec:
    return KernelSpec(
        op=op,
        variant=variant,
        name="liger",
        aliases=("liger_kernel",),
        target=f"opslot_backends.liger.{target}",
        nested=f"opslot_backends.liger.{nested}",
        requires=_REQUIRES,
        dtypes=_DTYPES,
        compile=True,
        cuda_graphs=True,
        deterministic=deterministic,
        priority=priority,
        summary=summary,
    )


BACKEND = Backend(
    api=1,
    kernels=(
        _kernel(
            "rms_norm",
            "standard",
            "rms_norm:rms_norm",
            "rms_norm:implementation",
            Priority.PORTABLE,
            "one block a row; keeps x and one number a row for backward",
        ),
        _kernel(
            "rms_norm",
            "fp32_weight",
            "rms_norm:rms_norm_fp32_weight",
            "rms_norm:implementation",
            Priority.TUNED,
            "one block a row; keeps x and one number a row for backward",
        ),
        _kernel(
            "rms_norm",
            "zero_centered",
            "rms_norm:rms_norm_zero_centered",
            "rms_norm:implementation",
            Priority.TUNED,
            "one block a row; keeps x and one number a row for backward",
        ),
        _kernel(
            "rms_norm",
            "unweighted",
            "rms_norm:rms_norm_unweighted",
            "rms_norm:implementation",
            Priority.TUNED,
            "one block a row, rounded once; keeps x and one number a row for backward",
        ),
        _kernel(
            "rms_norm",
            "unweighted_fp32",
            "rms_norm:rms_norm_unweighted",
            "rms_norm:implementation",
            Priority.TUNED,
            "one block a row; keeps x and one number a row for backward",
        ),
        _kernel(
            "rotary_pos_emb",
            "full",
            "rotary_pos_emb:rotary_pos_emb",
            "rotary_pos_emb:implementation",
            Priority.TUNED,
            "queries and keys of a token at once; refuses tables whose halves differ",
        ),
        _kernel(
            "rotary_pos_emb",
            "partial",
            "rotary_pos_emb:rotary_pos_emb",
            "rotary_pos_emb:implementation",
            Priority.TUNED,
            "queries and keys of a token at once; refuses tables whose halves differ",
        ),
        _kernel(
            "rotary_pos_emb",
            "half_table",
            "rotary_pos_emb:rotary_pos_emb_half_table",
            "rotary_pos_emb:implementation",
            Priority.TUNED,
            "queries and keys of a token at once",
        ),
        _kernel(
            "glu",
            "swiglu",
            "glu:swiglu",
            "glu:swiglu_implementation",
            Priority.TUNED,
            "keeps gate and up alone, and writes their gradients over them where nobody else sees it",
        ),
        _kernel(
            "glu",
            "geglu_tanh",
            "glu:geglu_tanh",
            "glu:geglu_implementation",
            Priority.TUNED,
            "keeps gate and up alone, and writes their gradients over them where nobody else sees it",
        ),
        _kernel(
            "cross_entropy_loss",
            "causal",
            "cross_entropy_loss:causal",
            "cross_entropy_loss:implementation",
            Priority.TUNED,
            "head and loss over chunks of tokens, logits become their gradients in one pass",
        ),
        _kernel(
            "cross_entropy_loss",
            "token_cls",
            "cross_entropy_loss:token_cls",
            "cross_entropy_loss:implementation",
            Priority.TUNED,
            "head and loss over chunks of tokens, logits become their gradients in one pass",
        ),
    ),
)
