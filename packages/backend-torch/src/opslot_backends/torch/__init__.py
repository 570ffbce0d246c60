"""opslot kernels in plain PyTorch, for every device.

This file is data: importing it imports neither torch nor the kernels.
"""

from opslot import Backend, KernelSpec, Priority

BACKEND = Backend(
    api=1,
    kernels=(
        KernelSpec(
            op="cross_entropy_loss",
            variant="causal",
            name="chunk_loss",
            target="opslot_backends.torch.cross_entropy_loss:chunk_loss",
            compile=True,
            cuda_graphs=True,
            deterministic=True,
            priority=Priority.PORTABLE,
            summary="head and loss over chunks of tokens: never holds all logits, makes gradients in forward",
        ),
        KernelSpec(
            op="glu",
            variant="swiglu",
            name="torch",
            target="opslot_backends.torch.glu:swiglu",
            compile=True,
            cuda_graphs=True,
            deterministic=True,
            priority=Priority.BY_NAME,
            summary="keeps only its inputs for backward and computes silu again: choose it when memory is short",
        ),
        KernelSpec(
            op="load_balancing_loss",
            variant="standard",
            name="torch",
            target="opslot_backends.torch.load_balancing_loss:load_balancing_loss",
            compile=True,
            cuda_graphs=True,
            deterministic=True,
            priority=Priority.PORTABLE,
            summary="many layers at once, gradient in closed form",
        ),
        KernelSpec(
            op="moe_experts",
            variant="standard",
            name="torch",
            target="opslot_backends.torch.moe_experts:moe_experts",
            compile=True,
            deterministic=True,
            priority=Priority.PORTABLE,
            summary="tokens sorted by expert, torch's grouped_mm where it is native; keeps one activation for backward",
        ),
        KernelSpec(
            op="rms_norm",
            variant="standard",
            name="torch",
            target="opslot_backends.torch.rms_norm:rms_norm",
            compile=True,
            cuda_graphs=True,
            deterministic=True,
            priority=Priority.PORTABLE,
            summary="torch's fused kernel on CUDA, a gradient in closed form elsewhere",
        ),
        KernelSpec(
            op="rotary_pos_emb",
            variant="full",
            name="torch",
            target="opslot_backends.torch.rotary_pos_emb:rotary_pos_emb",
            compile=True,
            cuda_graphs=True,
            deterministic=True,
            priority=Priority.PORTABLE,
            summary="rotates halves in place of copying them, gradient in closed form",
        ),
    ),
)
