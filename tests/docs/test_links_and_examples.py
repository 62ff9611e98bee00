"""Links of the documentation lead to files and headings; its Python and TOML examples load."""

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from orchestrator.config.advantage import AdvantageConfig
from tests.docs.pages import PAGES, ROOT, Text, blocks, links
from trainer.config.loss import LossConfig

ASKED_FOR = (
    "quick-start",
    "configuration",
    "algorithms",
    "operations",
    "scaling",
    "security",
    "environments",
    "extending",
)


def test_the_pages_exist() -> None:
    assert {f"{name}.md" for name in ASKED_FOR} <= {page.name for page in PAGES}


def test_every_relative_link_leads_somewhere() -> None:
    broken = [str(link) for link in links() if not _leads_somewhere(link)]
    assert not broken


def _leads_somewhere(link: Text) -> bool:
    page = ROOT / link.page if link.page == "README.md" else ROOT / "docs" / link.page
    path, _, anchor = link.text.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in _anchors(target))


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_examples_can_be_imported(block: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "documented_example"
    (tmp_path / f"{name}.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    try:
        importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_examples_are_toml_and_name_losses_and_advantages_that_exist(block: Text) -> None:
    tables: dict[str, Any] = tomllib.loads(block.text)
    for service in (tables, tables.get("trainer", {}), tables.get("orchestrator", {})):
        if "loss" in service:
            TypeAdapter(LossConfig).validate_python(service["loss"])
        if "advantage" in service:
            TypeAdapter(AdvantageConfig).validate_python(service["advantage"])
