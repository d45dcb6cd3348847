"""docs/protocol.md shows the tables that the machines have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protocol_doc", ROOT / "tools" / "protocol_doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_doc_is_current(tool: ModuleType) -> None:
    text = tool.DOC.read_text()
    assert tool.with_tables(text) == text, "run python tools/protocol_doc.py"


def test_every_row_is_drawn(tool: ModuleType) -> None:
    for _, table in tool.TABLES.values():
        drawn = tool.diagram(table)
        for (state, what), after in table.items():
            if state is after:
                (line,) = [line for line in drawn.splitlines() if line.startswith(f"- *{state.value}*")]
            else:
                (line,) = [line for line in drawn.splitlines() if f"    {state.value} --> {after.value}:" in line]
            assert what.value in line
