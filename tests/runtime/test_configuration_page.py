"""docs/configuration.md is what the config classes say."""

from pathlib import Path

from runtime.launch.rl_config import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: python -m runtime.launch.rl_config > docs/configuration.md"
