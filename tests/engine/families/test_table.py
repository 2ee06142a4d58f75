"""docs/compatibility.md has exactly the families that are tried."""

from pathlib import Path

from kit.families.table import FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "compatibility.md"


def test_the_docs_have_each_family() -> None:
    """Row by row, in this order, and nothing else."""
    gate = {True: "`make test`", False: "`make test-families`"}
    rows = [
        f"| {family.name} | {family.keeps} | {family.dtype} | {gate[family.in_gate]} | {family.lora} |"
        for family in FAMILIES
    ]
    lines = DOCS.read_text().splitlines()
    start = lines.index("| family | what the cache keeps | tried in | by | with LoRA |") + 2
    assert lines[start : lines.index("", start)] == rows, "\n".join(rows)
