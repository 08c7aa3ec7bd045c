"""What the README promises in tables is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from pagedgen import errors

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_every_row_error_code_is_documented_as_it_is():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", README, re.MULTILINE))
    assert {code: rows[code] for code in errors.ROW_ERROR_CODES} == errors.ROW_ERROR_CODES


def test_every_exit_code_is_documented():
    documented = {int(n) for n in re.findall(r"^\| (\d+) \| .+ \|$", README, re.MULTILINE)}
    assert documented == {v for k, v in vars(errors).items() if k.startswith("EXIT_")}


def test_links_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md"), *ROOT.glob("data/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
