"""Everything that generation would write, made in memory first, so that a refusal leaves the folder as it was."""

from dataclasses import dataclass
from pathlib import Path

from opslot_patchgen._artifact import build
from opslot_patchgen._errors import PatchgenError
from opslot_patchgen._source import Source, read_source
from opslot_patchgen._specs import SpecPackage


@dataclass(frozen=True)
class Plan:
    """`files` is what is to be written, `sources` what each generated module came from, `refusals` what cannot be."""

    files: dict[Path, str]
    sources: dict[Path, Source]
    refusals: tuple[PatchgenError, ...]

    def write(self) -> None:
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8"))


def plan(package: SpecPackage, root: Path | None = None) -> Plan:
    """Generate every spec of `package` from the tree at `root`, or from the installed transformers."""
    files: dict[Path, str] = {}
    sources: dict[Path, Source] = {}
    refusals: list[PatchgenError] = []
    files[package.generated / "__init__.py"] = '"""Generated: one folder per transformers release."""\n'
    for spec in package.specs:
        try:
            source = read_source(spec.source, root)
            artifact = build(spec, source, package.name)
        except PatchgenError as error:
            refusals.append(error)
            continue
        folder = package.generated / source.folder
        files[folder / "__init__.py"] = f'"""Generated from transformers {source.version}."""\n'
        path = folder / source.path.name
        sources[path] = source
        files[path] = artifact.text
        files[path.with_suffix(".patch")] = artifact.patch
    return Plan(files, sources, tuple(refusals))
