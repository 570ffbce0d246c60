"""`opslot verify`: the conformance kit over installed kernels, each check in a process that may die of it."""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from opslot import EAGER, Offer, OpContract, OpslotError, Registry, UnknownKernel
from opslot.testing import CHECKS
from opslot.testing._suite import ALL, dtypes_of
from opslot.tools.measure import device_to_measure, environment
from opslot.tools.output import command_of, print_json, print_table, quiet_registry


@dataclass(frozen=True)
class Job:
    """One check of one kernel."""

    op: str
    variant: str
    kernel: str
    device: str
    dtype: str
    check: str
    seed: int

    @property
    def subject(self) -> tuple[str, str, str]:
        return f"{self.op}/{self.variant}", self.kernel, self.dtype

    def command(self) -> str:
        return (
            f"opslot verify {self.op}/{self.variant} --kernel {self.kernel} --device {self.device} "
            f"--dtype {self.dtype} --check {self.check} --seed {self.seed}"
        )


@dataclass(frozen=True)
class Outcome:
    """`problem` is empty when the check passed. `source` says which code was checked, as bindings do."""

    job: Job
    problem: str
    seconds: float
    source: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", metavar="OP[/VARIANT]", help="default: every op")
    parser.add_argument("--kernel", help="a kernel's name, dist:name, or eager; default: every kernel that runs here")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: the present accelerator, else the CPU")
    parser.add_argument("--dtype", action="append", help="may be repeated; default: those of the kernel's spec")
    parser.add_argument("--check", action="append", choices=tuple(CHECKS), metavar="CHECK", help=_CHECKS)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of one check; default: %(default)s")
    parser.add_argument("--workers", type=int, help="processes; default: one a core for the CPU, else one")


_FLAGS = ("kernel", "device", "dtype", "check", "seed", "seconds", "workers")
_CHECKS = f"may be repeated; default: all but large, which takes most of a GPU's memory: {', '.join(CHECKS)}"


def run(options: argparse.Namespace) -> int:
    known = quiet_registry()
    if options.device is not None:
        known.describe(options.device)  # raises for a device that is not here
    device = device_to_measure(options.device)
    jobs, absent = plan(known, options.op, options.kernel, device, options.dtype, options.check or ALL, options.seed)
    if not jobs and not absent:
        raise OpslotError(f"nothing to verify: no installed backend has a kernel for {options.op or 'any op'}")
    workers = options.workers or (os.cpu_count() or 1 if device == "cpu" else 1)
    outcomes = list(verify(jobs, seconds=options.seconds, workers=workers))
    findings = [outcome for outcome in outcomes if outcome.problem]
    if options.json:
        offers = {known.offer(j.op, j.variant, j.kernel) for j in jobs if j.kernel != EAGER}
        print_json(
            {
                "command": command_of(options, "verify", *filter(None, [options.op]), flags=_FLAGS),
                "date": datetime.date.today().isoformat(),
                "device": str(known.describe(device)),
                "environment": environment(device, known.describe(device), offers),
                "seed": options.seed,
                "outcomes": [_as_data(outcome) for outcome in outcomes],
                "not_run": [{"kernel": kernel, "reason": reason} for kernel, reason in absent],
            }
        )
        return 1 if findings else 0
    subjects = dict.fromkeys(outcome.job.subject for outcome in outcomes)
    rows = [(*subject, *_verdict([o for o in outcomes if o.job.subject == subject])) for subject in subjects]
    print(f"device: {known.describe(device)}")
    print_table(("op", "kernel", "dtype", "passed", "failed", "seconds"), rows)
    for kernel, reason in absent:
        print(f"not run: {kernel}: {reason}")
    # One fault may fail every check in the same words.
    same: dict[tuple[str, str], list[Outcome]] = {}
    for finding in findings:
        same.setdefault((finding.job.kernel, finding.problem), []).append(finding)
    for first, *others in same.values():
        also = f"\n  likewise: {', '.join(other.job.check for other in others)}" if others else ""
        print(f"\n{first.job.check}: {first.problem}{also}\n  again: {first.job.command()}")
    return 1 if findings else 0


def _as_data(outcome: Outcome) -> dict[str, Any]:
    seconds = round(outcome.seconds, 3)
    return {**asdict(outcome.job), "problem": outcome.problem, "seconds": seconds, "source": outcome.source}


def plan(
    known: Registry,
    op: str | None,
    kernel: str | None,
    device: str,
    dtypes: Sequence[str] | None,
    checks: Sequence[str],
    seed: int,
) -> tuple[list[Job], list[tuple[str, str]]]:
    """The checks to do, and the kernels that cannot run on `device`, with the reasons.

    Raises `OpslotError`s for an op, a kernel or a device that there is not, and for a kernel named that cannot run.
    """
    there = known.describe(device)
    jobs, absent, named = [], [], 0
    missing: list[UnknownKernel] = []
    for contract in _contracts(known, op):
        offers = [] if kernel == EAGER else known.offers(*contract.key)
        if kernel is not None and kernel != EAGER:
            try:
                offers = (known.offer(*contract.key, kernel),)
            except UnknownKernel as error:
                if op is not None:
                    missing.append(error)
                continue
        named += 1
        subjects = [(o.spec.name if _alone(o, offers) else o.selector, o.spec) for o in offers]
        for name, spec in [(EAGER, None)] if kernel == EAGER else subjects:
            unmet = spec.unmet(there) if spec is not None else ()
            if unmet:
                absent.append((f"{contract}:{name}", "; ".join(unmet)))
                continue
            for dtype in dtypes or dtypes_of(*contract.key, spec):
                if dtype not in contract.tolerances:
                    valid = ", ".join(sorted(contract.tolerances))
                    raise OpslotError(f"{contract} has tolerances for {valid}, not for {dtype!r}")
                jobs += [Job(*contract.key, name, device, dtype, check, seed) for check in checks]
    if kernel is not None and not named:
        if missing:
            raise missing[0]
        raise UnknownKernel(f"no op has a kernel {kernel!r}{known.missing()}: see `opslot list`")
    if kernel is not None and absent and not jobs:
        first, why = absent[0]
        more = f", and {', '.join(name for name, _ in absent[1:])} likewise" if absent[1:] else ""
        raise OpslotError(f"{first} cannot run on {there}: {why}{more}. `opslot explain` shows what can")
    return jobs, absent


def verify(jobs: Sequence[Job], *, seconds: float = 300, workers: int = 1) -> Iterator[Outcome]:
    """Do the checks in `workers` processes, and give their outcomes in order.

    Whatever a kernel does to its process, even never returning, is an outcome; the checks after it go on in another.
    """
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.subject, []).append(job)
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        for outcomes in pool.map(lambda group: list(_verify(group, seconds, workers)), groups.values()):
            yield from outcomes


def _verify(jobs: list[Job], seconds: float, workers: int) -> Iterator[Outcome]:
    while jobs:
        done = list(_outcomes_of_one_worker(jobs, seconds, workers))
        yield from done
        jobs = jobs[len(done) :]


def _outcomes_of_one_worker(jobs: list[Job], seconds: float, workers: int) -> Iterator[Outcome]:
    """The outcomes of one worker, until all is done or it dies; what it died of is the last one."""
    environment = dict(os.environ)
    if workers > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "opslot.testing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        env=environment,
        start_new_session=True,  # so that what a kernel forks can be stopped with it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []
    listener = threading.Thread(target=lambda stream: said.extend(stream), args=(process.stderr,), daemon=True)
    listener.start()
    json.dump([asdict(job) for job in jobs], process.stdin)
    process.stdin.close()
    limit = _Limit(process, seconds)
    begun, ended = None, 0
    try:
        for line in process.stdout:
            try:
                event: dict[str, Any] = dict(json.loads(line))
            except (ValueError, TypeError):  # a kernel wrote here, past Python
                continue
            # In order only: a process that a kernel has forked may go on with the same checks.
            if begun is None and event.get("begin") == ended:
                begun = ended
                limit.start()
            elif begun is not None and event.get("end") == begun:
                limit.stop()
                begun, ended = None, ended + 1
                yield Outcome(jobs[event["end"]], event["problem"], event["seconds"], event["source"])
                if ended == len(jobs):  # threads and processes that kernels left may hold the pipe open for ever
                    break
        # It has closed its answers: it ends now, or is made to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        limit.stop()
        _stop(process)
    listener.join(5)
    if begun is not None:
        why = f"takes more than {seconds:g} seconds" if limit.passed else _last_words(said, process.returncode)
        job = jobs[begun]
        where = f"{job.op}/{job.variant}, kernel {job.kernel} ({job.dtype} on {job.device}, seed {job.seed})"
        yield Outcome(job, f"{where}: {why}", seconds if limit.passed else 0.0)
    elif ended < len(jobs):
        raise OpslotError(f"the process that runs the checks failed: {_last_words(said, process.returncode)}")


def _stop(process: "subprocess.Popen[str]") -> None:
    """End the process, and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Limit:
    """Kills a process that does not come back in time."""

    def __init__(self, process: "subprocess.Popen[str]", seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self.passed = False

    def start(self) -> None:
        self._timer = threading.Timer(self._seconds, self._kill)
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _kill(self) -> None:
        self.passed = True
        _stop(self._process)


def _last_words(lines: Iterable[str], code: int) -> str:
    """The exception that ended a process, with its notes, from what it wrote to stderr."""
    text = "".join(lines)
    last = text.rpartition("Traceback (most recent call last):")[2] if "Traceback" in text else text
    words = [line.rstrip() for line in last.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return f"raised {'; '.join(words)}"[:2000] if code == 1 and words else f"ended its process with code {code}"


def _contracts(known: Registry, op: str | None) -> tuple[OpContract, ...]:
    if op is None:
        return known.contracts()
    name, _, variant = op.partition("/")
    if variant:
        return (known.contract(name, variant),)
    found = tuple(contract for contract in known.contracts() if contract.op == name)
    return found or (known.contract(name),)


def _alone(offer: Offer, offers: Sequence[Offer]) -> bool:
    return sum(other.spec.name == offer.spec.name for other in offers) == 1


def _verdict(outcomes: list[Outcome]) -> tuple[str, str, str]:
    failed = [outcome.job.check for outcome in outcomes if outcome.problem]
    passed = len(outcomes) - len(failed)
    return str(passed), ", ".join(failed) or "-", f"{sum(outcome.seconds for outcome in outcomes):.1f}"
