"""`opslot doctor`: what is wrong with this environment, and what to do about it.

`look` gathers facts into a `Machine`; each check is a function from a `Machine` to `Finding`s.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from itertools import combinations
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from opslot import BackendRecord, ConfigError, OpsConfig, OpslotError, Registry
from opslot._distributions import Folder
from opslot._environment import STRICT, cache_problem, strict
from opslot._report import counted
from opslot._selection import VARIABLE as BACKENDS
from opslot.tools.metadata import modules
from opslot.tools.output import print_json, quiet_registry


@dataclass(frozen=True)
class Finding:
    """One problem: what it is, why it is one, and what would mend it."""

    what: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Torch:
    """What an import of torch tells: `hip` or `cuda` is the version that it was built for."""

    version: str
    hip: str | None = None
    cuda: str | None = None

    def __str__(self) -> str:
        built = f"ROCm {self.hip}" if self.hip else f"CUDA {self.cuda}" if self.cuda else "neither CUDA nor ROCm"
        return f"{self.version}, built for {built}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts. Names of distributions are in PyPI's canonical form.

    `needs` are the dependencies, of those distributions that matter here, whose markers hold; `triton` are the
    distributions that install the module of that name, `unreadable` the folders of metadata that name no distribution,
    `variables` what is wrong with opslot's environment variables. The errors are what an import in a fresh process
    raised.
    """

    device: str = ""
    device_error: str = ""
    torch: Torch | None = None
    torch_error: str = ""
    npu_error: str = ""
    triton: tuple[str, ...] = ()
    versions: Mapping[str, str]
    needs: Mapping[str, tuple[str, ...]]
    records: tuple[BackendRecord, ...] = ()
    unreadable: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


def run(options: argparse.Namespace) -> int:
    machine = look()
    findings = examine(machine)
    if options.json:
        print_json(_as_dict(machine, findings))
    else:
        print(_as_text(machine, findings))
    return int(bool(findings))


def examine(machine: Machine) -> tuple[Finding, ...]:
    return tuple(finding for check in CHECKS for finding in check(machine))


def check_torch(machine: Machine) -> Iterator[Finding]:
    if "torch" not in machine.versions and machine.torch is None:
        yield Finding(
            "torch is not installed",
            "opslot lists and judges kernels without it, but nothing can be bound",
            "install the build of PyTorch that is for this accelerator, see https://pytorch.org/get-started/locally",
        )
    elif machine.torch is None and not _needs_cann(machine):
        yield Finding(
            f"torch {machine.versions.get('torch', '')} cannot be imported",
            machine.torch_error,
            f"run `{sys.executable} -c 'import torch'` to see all of it; reinstall torch if its files are damaged",
        )
    elif machine.device_error:
        yield Finding(
            "the accelerator does not answer",
            machine.device_error,
            "look at the driver; to work on the CPU meanwhile, pass device='cpu' to opslot.bind",
        )


def check_npu(machine: Machine) -> Iterator[Finding]:
    if _needs_cann(machine):
        broken = "" if machine.torch else ", and so torch cannot be imported"
        yield Finding(
            f"torch-npu {machine.versions['torch-npu']} cannot be imported{broken}",
            machine.npu_error,
            "install Ascend's CANN toolkit and source its set_env.sh in this shell, or on a machine without an NPU "
            "`pip uninstall torch-npu`; meanwhile TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch itself usable",
        )


def _needs_cann(machine: Machine) -> bool:
    """Whether torch-npu is to blame, and not a torch that no backend could work with."""
    return bool(machine.npu_error) and (not machine.torch_error or "torch_npu" in machine.torch_error)


def check_triton(machine: Machine) -> Iterator[Finding]:
    """ROCm builds of torch bring a triton of their own, under another name but with the same files as NVIDIA's."""
    wanted = {canonicalize_name(r.name): text for text, r in _requirements(machine, "torch") if "triton" in r.name}
    both = " and ".join(machine.triton)
    mend = f"pip uninstall {' '.join(machine.triton)}, then pip install {' '.join(map(repr, wanted.values())) or 'one'}"
    if len(machine.triton) > 1:
        yield Finding(
            f"{both} both install the module triton",
            "what was installed last has overwritten files of the other"
            + (f"; torch {machine.torch} needs {' '.join(wanted)}" if machine.torch and wanted else ""),
            mend,
        )
    elif machine.torch and machine.torch.hip and wanted and machine.triton and not set(machine.triton) <= set(wanted):
        yield Finding(
            f"the module triton is that of {both}, beside a ROCm torch",
            f"torch {machine.torch} needs {' '.join(wanted)}",
            mend,
        )


def check_backends(machine: Machine) -> Iterator[Finding]:
    for record in machine.records:
        if record.error is not None:
            yield Finding(
                f"backend {record.name} of {record.distribution} {record.version} failed to load",
                record.message,
                f"`opslot backends` shows the traceback; upgrade or uninstall {record.distribution}",
            )


def check_variables(machine: Machine) -> Iterator[Finding]:
    for problem in machine.variables:
        yield Finding(
            "an environment variable of opslot cannot be used",
            problem,
            "correct or unset it; until then every bind and most commands raise this error",
        )


def check_metadata(machine: Machine) -> Iterator[Finding]:
    for folder in machine.unreadable:
        yield Finding(
            f"{folder} is no metadata of any distribution",
            "its METADATA is missing, names no distribution or is not UTF-8, as after an interrupted installation",
            "reinstall what it was of, or delete the folder",
        )


def check_dependencies(machine: Machine) -> Iterator[Finding]:
    for distribution in sorted(machine.needs):
        for text, required in _requirements(machine, distribution):
            name = canonicalize_name(required.name)
            found = machine.versions.get(name)
            if name == "torch" and found is None:
                continue  # said by check_torch
            if found is None or not _admits(required.specifier, found):
                yield Finding(
                    f"{distribution} {machine.versions.get(distribution, '')} needs {text}",
                    f"{name} {found} is installed" if found is not None else f"{name} is not installed",
                    f"pip install '{required.name}{required.specifier}'",
                )


@dataclass(frozen=True)
class _Demand:
    """What the kernels of one backend for these ops ask of a package: a version in any one of the ranges."""

    backend: str
    ops: tuple[str, ...]
    package: str
    ranges: frozenset[SpecifierSet]

    def __str__(self) -> str:
        return " or ".join(sorted(f"{self.package}{span}" for span in self.ranges))

    @property
    def who(self) -> str:
        return f"{self.backend} ({', '.join(self.ops)})"


def check_ranges(machine: Machine) -> Iterator[Finding]:
    for demand in _demands(machine.records):
        found = machine.versions.get(demand.package)
        if found is not None and not any(_admits(span, found) for span in demand.ranges):
            yield Finding(
                f"{demand.who} needs {demand}",
                f"{demand.package} {found} is installed, so these kernels cannot run",
                f"pip install '{str(demand).partition(' or ')[0]}'",
            )


def check_conflicts(machine: Machine) -> Iterator[Finding]:
    for one, other in combinations(_demands(machine.records), 2):
        if one.package != other.package or one.backend == other.backend:
            continue
        if not any(satisfiable(a & b) for a in one.ranges for b in other.ranges):
            yield Finding(
                f"no version of {one.package} suits both {one.backend} and {other.backend}",
                f"{one.who} needs {one}, {other.who} needs {other}",
                f"give each an environment of its own, or uninstall {one.backend} or {other.backend}",
            )


CHECKS: tuple[Callable[[Machine], Iterable[Finding]], ...] = (
    check_variables,
    check_metadata,
    check_torch,
    check_npu,
    check_triton,
    check_backends,
    check_dependencies,
    check_ranges,
    check_conflicts,
)


def _demands(records: Iterable[BackendRecord]) -> list[_Demand]:
    """Kernels of one op are alternatives: one for each generation of a library is how a backend supports both.

    So what one of them does without, the op does not need.
    """
    ranges: dict[tuple[str, str, str], set[SpecifierSet]] = {}
    kernels: Counter[tuple[str, str]] = Counter()
    naming: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        for spec in record.backend.kernels if record.backend else ():
            kernels[record.distribution, f"{spec.op}/{spec.variant}"] += 1
            spans: dict[str, SpecifierSet] = {}
            for text in spec.requires.packages:
                required = Requirement(text)
                name: str = canonicalize_name(required.name)
                spans[name] = spans.get(name, SpecifierSet()) & required.specifier
            for name, span in spans.items():
                key = record.distribution, name, f"{spec.op}/{spec.variant}"
                naming[key] += 1
                ranges.setdefault(key, set()).add(span)
    ops: dict[tuple[str, str, frozenset[SpecifierSet]], list[str]] = {}
    for (backend, package, op), alternatives in ranges.items():
        if naming[backend, package, op] < kernels[backend, op]:
            continue
        ops.setdefault((backend, package, frozenset(alternatives)), []).append(op)
    return [_Demand(backend, tuple(sorted(who)), package, spans) for (backend, package, spans), who in ops.items()]


def satisfiable(ranges: SpecifierSet) -> bool:
    """Whether any version is in the ranges. If one is, then so is a bound or what comes next after one.

    Of pre-releases only the bounds are tried.
    """
    bounds = [Version("0"), *(Version(s.version.removesuffix(".*")) for s in ranges if s.operator != "===")]
    tried = {s.version for s in ranges}
    for bound in bounds:
        epoch, release = f"{bound.epoch}!", bound.release
        above = [(*release[:i], release[i] + 1) for i in range(len(release))]
        tried |= {epoch + ".".join(map(str, parts)) for parts in (release, (*release, 0, 1), *above)}
    return any(_admits(ranges, version) for version in tried)


def _admits(span: SpecifierSet, version: str) -> bool:
    try:
        return span.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _requirements(machine: Machine, distribution: str) -> Iterator[tuple[str, Requirement]]:
    for text in machine.needs.get(distribution, ()):
        yield text.partition(";")[0].strip(), Requirement(text)


_TORCH = """
import json, torch
print("torch=" + json.dumps([torch.__version__, torch.version.hip, torch.version.cuda]), flush=True)
import opslot
print(f"device={opslot.registry().current_device()}")
"""


@contextmanager
def _variables() -> Iterator[tuple[Registry, tuple[str, ...]]]:
    """The registry, and what is wrong with opslot's environment variables: inside, what is wrong is not in force.

    Nor is strictness: a backend that failed is a finding of its own.
    """
    before = {name: os.environ.get(name) for name in (STRICT, BACKENDS)}
    problems = []
    try:
        try:
            strict()
        except ConfigError as error:
            problems.append(str(error))
        os.environ[STRICT] = "0"
        complete = True
        try:
            known = quiet_registry()
        except ConfigError as error:
            problems.append(str(error))
            os.environ[BACKENDS] = ""  # as everywhere, a typo lets no code in
            known, complete = quiet_registry(), False
        try:
            choices = OpsConfig.from_environment()
            if choices is not None and complete:
                choices.rules(known)
        except OpslotError as error:
            problems.append(str(error))
        if (problem := cache_problem()) is not None:
            problems.append(problem)
        yield known, tuple(problems)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def look() -> Machine:
    """The facts about this environment. Torch is asked in a process of its own: a broken one may end it."""
    with _variables() as (known, problems):
        return _look(known, problems)


def _look(known: Registry, problems: tuple[str, ...]) -> Machine:
    folders = [Folder(found) for found in reversed(list(distributions()))]
    named: dict[str, Folder] = {canonicalize_name(folder.name): folder for folder in folders if folder.whole}
    versions = {name: folder.version for name, folder in named.items()}
    matter = {canonicalize_name(record.distribution) for record in known.records} | {"torch", "torch-npu"}
    matter |= {name for name in versions if name.startswith("opslot")}
    matter |= {demand.package for demand in _demands(known.records)}
    printed, error = _ask(_TORCH)
    # Vendors print what they like while they are imported.
    answers = dict(line.split("=", 1) for line in printed.splitlines() if line.startswith(("torch=", "device=")))
    torch = Torch(*json.loads(answers["torch"])) if "torch" in answers else None
    return Machine(
        device=answers.get("device", ""),
        device_error=error if torch else "",
        torch=torch,
        torch_error="" if torch else error,
        npu_error=_ask("import torch_npu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")[1] if "torch-npu" in versions else "",
        triton=tuple(sorted(name for name, folder in named.items() if "triton" in modules(folder.distribution))),
        versions=versions,
        needs={name: _needs(named[name]) for name in sorted(matter) if name in named},
        unreadable=tuple(sorted(folder.path for folder in folders if not folder.whole)),
        records=tuple(known.records),
        variables=problems,
    )


def _ask(code: str, **environment: str) -> tuple[str, str]:
    """What the code prints in a fresh interpreter, and the last line of its error when it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired as error:
        return "", f"no answer in {error.timeout:.0f} seconds"
    last = done.stderr.strip().rpartition("\n")[2] or f"the process ended with {done.returncode}"
    return done.stdout.strip(), last if done.returncode else ""


def _needs(folder: Folder) -> tuple[str, ...]:
    needs = []
    try:
        requires = folder.distribution.requires or ()
    except UnicodeDecodeError:  # of the requires.txt in an egg-info
        return ()
    for text in requires:
        try:
            marker = Requirement(text).marker
        except InvalidRequirement:
            continue  # of old packages; pip does not read it either
        if marker is None or marker.evaluate({"extra": ""}):
            needs.append(text)
    return tuple(needs)


def _as_dict(machine: Machine, findings: tuple[Finding, ...]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": machine.device or None,
        "torch": asdict(machine.torch) if machine.torch else None,
        "distributions": {name: machine.versions[name] for name in machine.needs},
        "backends": [
            {
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
                "loaded": record.backend is not None,
            }
            for record in machine.records
        ],
        "findings": [asdict(finding) for finding in findings],
    }


def _as_text(machine: Machine, findings: tuple[Finding, ...]) -> str:
    lines = [
        f"python:  {platform.python_version()} on {platform.platform()}",
        f"torch:   {machine.torch or 'cannot be used'}",
        f"device:  {machine.device or 'not known'}",
        f"with:    {', '.join(f'{name} {machine.versions[name]}' for name in machine.needs if name != 'torch')}",
        f"\n{counted(len(findings), 'problem') if findings else 'no problems'} found",
    ]
    for finding in findings:
        lines += [f"\n{finding.what}", f"  why:    {finding.why}", f"  remedy: {finding.remedy}"]
    return "\n".join(lines)
