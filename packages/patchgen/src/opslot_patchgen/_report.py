"""A drift in words: text for people, JSON with stable keys, and Markdown for a pull request."""

import json

from opslot_patchgen._drift import KINDS, Drift, FamilyDrift, Finding

_NOTHING = "nothing changed"


def as_text(drift: Drift) -> str:
    lines = [f"transformers {drift.before} -> {drift.after}"]
    for family in drift.families:
        lines.append(f"{family.family} ({family.source}): {_verdict(family)}")
        for finding in family.findings:
            lines.append(f"  {finding.kind}: {_where(finding)}{finding.summary}")
            lines += [f"    {line}" for line in finding.diff.split("\n") if line]
    return "\n".join(lines) + "\n"


def as_json(drift: Drift) -> str:
    families = {
        family.family: {
            "source": family.source,
            "verdict": _verdict(family),
            "findings": [
                {
                    "kind": finding.kind,
                    "target": finding.target,
                    "subject": finding.subject,
                    "summary": finding.summary,
                    "candidates": list(finding.candidates),
                    "diff": finding.diff,
                }
                for finding in family.findings
            ],
        }
        for family in drift.families
    }
    data = {"from": drift.before, "to": drift.after, "exit_code": drift.exit_code, "families": families}
    return json.dumps(data, indent=1) + "\n"


def as_markdown(drift: Drift) -> str:
    """A table with one row per finding, and the diffs folded below it."""
    rows = ["| family | target | kind | what |", "|---|---|---|---|"]
    folded = []
    for family in drift.families:
        if not family.findings:
            rows.append(f"| {family.family} | | | {_NOTHING} |")
        for finding in family.findings:
            target = f"`{finding.target}`" if finding.target else ""
            rows.append(f"| {family.family} | {target} | {finding.kind} | {_cell(finding.summary)} |")
            if finding.diff:
                # The fence is longer than any in a docstring.
                folded += [f"<details><summary>{family.family}: {finding.subject}</summary>", "", "`````diff"]
                folded += [*finding.diff.removesuffix("\n").split("\n"), "`````", "", "</details>", ""]
    return "\n".join([f"transformers {drift.before} to {drift.after}", "", *rows, "", *folded])


def _verdict(family: FamilyDrift) -> str:
    if not family.findings:
        return _NOTHING
    worst = max(family.findings, key=lambda finding: KINDS[finding.kind])
    return {0: "cosmetic", 2: "changed", 3: "a target is gone"}[KINDS[worst.kind]]


def _where(finding: Finding) -> str:
    return f"{finding.target}: " if finding.target else ""


def _cell(text: str) -> str:
    """A bar would end the cell, and what looks like a tag or a mention would be one."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    return text.replace("@", "@\u200b")
