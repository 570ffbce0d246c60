"""Kernels: one implementation of one contract, as data."""

import re
from dataclasses import dataclass, field
from enum import IntEnum

from ._device import Device
from ._errors import SpecError
from ._installed import Installed
from ._requires import Requires, check_strings
from ._target import Target, check_target

EAGER = "eager"
AUTO = "auto"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_DTYPE = re.compile(r"b?float\d+\w*")


class Priority(IntEnum):
    """What `auto` prefers. It takes the usable kernel of the highest band, and eager when none is above BY_NAME.

    BY_NAME: never chosen by `auto`, only by name (experimental, or a trade that its user must want).
    PORTABLE: less time or less memory than eager on every device it supports, at no cost that a training step notices.
    TUNED: written for one family of devices, and measured there to beat the portable kernels.
    NATIVE: the fastest verified kernel on the architectures that it requires.
    """

    BY_NAME = 0
    PORTABLE = 10
    TUNED = 20
    NATIVE = 30


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One implementation of one `(op, variant)`.

    `target` is the function, or "module:attr" which is imported when the kernel is first bound. `aliases` are other
    config values that mean this kernel. `dtypes` are the floating dtypes that it takes ("bfloat16"), empty means any;
    at bind those of the module's parameters are judged, at each call that of the first floating argument. `nested` is
    for a kernel that chooses among implementations itself: a function, or "module:attr", that returns the name of the
    one that runs here ("triton", "cutedsl"), for reports and fingerprints. `backward`, `compile`, `cuda_graphs`,
    `deterministic` and `batch_invariant` are claims: what a spec does not claim is not promised. Under
    `torch.use_deterministic_algorithms(True)` a kernel that does not claim `deterministic` raises `KernelUnavailable`
    when it is called, and with `warn_only=True` it warns, as torch's own operations do.

    `rms_error` is a limit of accuracy, by dtype: how many times the root mean square error of eager code the kernel may
    make where that is more than the 1.05 that `opslot verify` allows; the largest error may then grow in proportion.
    `measured` names the results (a file, a URL) that earned the priority; reports give it as the reason of `auto`.
    """

    op: str
    variant: str = "standard"
    name: str
    target: Target
    aliases: tuple[str, ...] = ()
    requires: Requires = field(default_factory=Requires)
    nested: Target | None = None
    dtypes: tuple[str, ...] = ()
    backward: bool = True
    compile: bool = False
    cuda_graphs: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    rms_error: tuple[tuple[str, float], ...] = ()
    priority: Priority = Priority.BY_NAME
    measured: str = ""
    summary: str = ""

    def __post_init__(self) -> None:
        for given in (self.op, self.variant, self.name, self.measured, self.summary):
            if not isinstance(given, str):
                raise SpecError(f"KernelSpec: op, variant, name, measured and summary must be strings, got {given!r}")
        for claim in (self.backward, self.compile, self.cuda_graphs, self.deterministic, self.batch_invariant):
            if not isinstance(claim, bool):
                raise SpecError(f"kernel {self}: a claim is True or False, got {claim!r}")
        check_strings(f"kernel {self}: aliases", self.aliases)
        check_strings(f"kernel {self}: dtypes", self.dtypes)
        for dtype in (*self.dtypes, *self._limited()):
            if not _DTYPE.fullmatch(dtype):
                raise SpecError(f"kernel {self}: {dtype!r} is not torch's name of a floating dtype, such as 'bfloat16'")
        if not isinstance(self.priority, Priority):
            raise SpecError(f"kernel {self}: priority must be a Priority, got {self.priority!r}")
        for name in (self.name, *self.aliases):
            if not _NAME.fullmatch(name):
                raise SpecError(f"kernel {self}: name {name!r} must be letters, digits, '_', '-' or '.'")
            if name in (EAGER, AUTO):
                raise SpecError(f"kernel {self}: {name!r} is reserved")
        if not isinstance(self.requires, Requires):
            raise SpecError(f"kernel {self}: requires must be a Requires, got {self.requires!r}")
        check_target(self.target, f"kernel {self}")
        if self.nested is not None:
            check_target(self.nested, f"kernel {self}: nested")

    def _limited(self) -> tuple[str, ...]:
        """The dtypes that `rms_error` limits."""
        given: object = self.rms_error
        pairs = given if isinstance(given, tuple) else ("not a tuple",)
        for pair in pairs:
            if not (isinstance(pair, tuple) and list(map(type, pair)) == [str, float] and pair[1] > 1):
                raise SpecError(
                    f'kernel {self}: rms_error is pairs of a dtype and a factor above one, (("float32", 1.2),), '
                    f"got {given!r}"
                )
        return tuple(pair[0] for pair in pairs)

    def unmet(
        self, device: Device, dtypes: tuple[str, ...] = (), installed: Installed | None = None
    ) -> tuple[str, ...]:
        """Why this kernel cannot run on `device` for parameters of `dtypes`; empty when it can.

        `installed` are the packages to judge by, those of this environment when None.
        """
        return self.requires.unmet(device, installed) + self.refused(dtypes)

    def refused(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        """Why this kernel does not take `dtypes`; empty when it does."""
        others = sorted(set(dtypes) - set(self.dtypes)) if self.dtypes else []
        return (f"takes {' or '.join(self.dtypes)}, not {', '.join(others)}",) if others else ()

    def __str__(self) -> str:
        return f"{self.op}/{self.variant}:{self.name}"
