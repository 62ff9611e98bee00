"""`TokenText`: the text of each token of a sequence, from the `tokenizer.json` of the model.

A token's text is what it adds to its neighbours before it: decoders drop or insert spaces at the start of a text, and a
character may need several tokens. Such a character is shown at its last token; the ones before show `⋯`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from runtime.run_dir import RunDir

CONTEXT = 4
"""Tokens before a token that decide how it is written."""
PART_OF_CHARACTER = "⋯"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """Decodes with `core`; without one, a token is shown as its id."""

    def __init__(self, core: tokenizers.Tokenizer | None) -> None:
        self._core = core

    @classmethod
    def of_run(cls, run_dir: RunDir) -> "TokenText":
        """The tokenizer of the model that the run's configs name, if it still lies there."""
        for folder in _model_folders(run_dir):
            try:
                return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
            except Exception:  # the library raises bare Exception; without a tokenizer the ids are shown
                continue
        return cls(None)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; together they are the text of the sequence."""
        if self._core is None:
            return [f"⟨{token_id}⟩" for token_id in token_ids]
        texts = []
        start = 0  # of the character that is not finished yet
        for place in range(len(token_ids)):
            before = self._decode(token_ids[max(0, start - CONTEXT) : start])
            text = self._decode(token_ids[max(0, start - CONTEXT) : place + 1])
            added = text[len(before) :] if text.startswith(before) else self._decode(token_ids[start : place + 1])
            if added.endswith(UNFINISHED) and place + 1 < len(token_ids) and place - start < CONTEXT:
                texts.append(PART_OF_CHARACTER)
                continue
            texts.append(added)
            start = place + 1
        return texts

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._core is not None
        text: str = self._core.decode(list(token_ids), skip_special_tokens=False)
        return text


def _model_folders(run_dir: RunDir) -> list[Path]:
    """`model.path` of the configs, as it is, and below the folders that the run lies in."""
    folders = []
    for name in ("rl", "trainer", "orchestrator", "inference"):
        try:
            model = json.loads((run_dir.config / f"{name}.json").read_bytes())["model"]["path"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        folders += [Path(model), *(parent / str(model) for parent in run_dir.path.resolve().parents)]
    return list(dict.fromkeys(folders))
