"""Every name and keyword of version 1 of opslot's backend API."""

from opslot import (
    API_VERSION,
    AUTO,
    EAGER,
    Backend,
    Device,
    DeviceKind,
    KernelSpec,
    OpContract,
    Priority,
    Requires,
    SpecError,
    Tolerance,
)

assert issubclass(SpecError, ValueError) and API_VERSION >= 1 and (AUTO, EAGER) == ("auto", "eager")

BACKEND = Backend(
    api=1,
    contracts=(
        OpContract(
            op="frozen_scale",
            variant="standard",
            summary="x * factor",
            reference="opslot_frozen.reference:frozen_scale",
            samples="opslot_frozen.reference:samples",
            tolerances={"float64": Tolerance(rtol=1e-15, atol=0.0), "float32": Tolerance(rtol=2e-7, atol=0.0)},
            fields=("frozen_scaling",),
            prefix="fused_",
            aliases=("frozen_rescale/standard",),
            activation="torch.nn.functional:relu",
        ),
    ),
    kernels=(
        KernelSpec(
            op="frozen_scale",
            variant="standard",
            name="frozen",
            target="opslot_frozen.kernels:frozen_scale",
            aliases=("frozen_kernel",),
            requires=Requires(devices=(), archs=(), packages=("torch>=2",), modules=("json",)),
            dtypes=("float64", "float32"),
            backward=True,
            compile=False,
            cuda_graphs=False,
            deterministic=True,
            batch_invariant=True,
            priority=Priority.PORTABLE,
            summary="the same, through a Function of its own",
        ),
        KernelSpec(
            op="frozen_scale",
            name="frozen_elsewhere",
            target="opslot_frozen.not_here:kernel",
            requires=Requires(devices=("frozen",), archs=("ice_1..ice_9", "snow*")),
            priority=Priority.NATIVE,
        ),
        KernelSpec(
            op="frozen_scale",
            name="frozen_by_name",
            target="opslot_frozen.kernels:frozen_scale",
            priority=Priority.BY_NAME,
        ),
        KernelSpec(
            op="frozen_scale",
            name="frozen_tuned",
            target="opslot_frozen.kernels:frozen_scale",
            backward=False,
            priority=Priority.TUNED,
        ),
    ),
    device_kinds=(DeviceKind(name="frozen", torch_type="frozen", probe="opslot_frozen.reference:probe"),),
)

assert Device(kind="frozen", arch="ice_3", name="cold").kind == "frozen"
