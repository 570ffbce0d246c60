"""What Acme offers to opslot. Importing this loads neither torch nor a kernel."""

from opslot import Backend, KernelSpec, Priority, Requires

from .relu_squared import RELU_SQUARED

BACKEND = Backend(
    api=1,
    contracts=(RELU_SQUARED,),
    kernels=(
        KernelSpec(
            op="rms_norm",
            variant="standard",
            name="acme",
            target="acme_opslot.kernels:rms_norm",
            requires=Requires(packages=("torch>=2.11,<2.15",)),
            priority=Priority.TUNED,
            summary="RMSNorm with a backward that recomputes the normalised input",
        ),
        KernelSpec(
            op="relu_squared",
            name="acme",
            target="acme_opslot.kernels:relu_squared",
            priority=Priority.TUNED,
            summary="squared ReLU that saves one tensor instead of two",
        ),
    ),
)
