"""`make_report`: one or two runs as a single HTML file that opens offline, with the same page as the live server.

The file embeds the page's scripts and the answers to the questions that the page will ask: everything about the run as
a whole, and as many groups, with their rollouts and tokens, as fit.
It needs no network: its own policy forbids connections.
"""

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence

import msgspec

from viewer.answers.answers import answer
from viewer.answers.params import Params
from viewer.errors import ViewerError
from viewer.index.run import Json, Run
from viewer.views.assets import assets, bundle

MAX_GROUPS = 200
"""Groups of one run that are tried; most runs reach the limit of bytes before."""
MAX_SEQUENCES = 60
"""Sequences beyond those of the groups: the most unusual ones."""
ROWS_TO_TRY = ("spread", "newest", "failed", "worst")
UNUSUAL = ("ratio", "masked", "kl")
# Inside a script element only these can end or open something; as escapes they are the same JSON.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def make_report(runs: Sequence[Run], max_bytes: int) -> str:
    """The document. Data of all runs together stay below about `max_bytes`."""
    parts = [_RunPart(run, max_bytes // len(runs)).fill() for run in runs]
    data = {"runs": [{"name": run.name} for run in runs], "answers": parts}
    return document(" and ".join(run.name for run in runs), msgspec.json.encode(data).decode())


def document(title: str, data: str) -> str:
    """The page around `data`, which is JSON. Whatever `data` and `title` hold, it cannot become markup or script."""
    script, style = bundle(), assets()["style.css"]
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    body = assets()["index.html"].partition("<body>")[2]
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)} · Tandem</title>",
            f"<style>{style}</style>\n</head>\n<body>",
            f'<script type="application/json" id="embedded">{escape_script(data)}</script>',
            body.partition("</body>")[0],
            f'<script type="module">{script}</script>\n</body>\n</html>\n',
        )
    )


def escape_script(text: str) -> str:
    """JSON that can stand inside a script element."""
    for character, escaped in ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class _RunPart:
    """The answers of one run, by question, as `static/source.js` looks them up."""

    def __init__(self, run: Run, max_bytes: int) -> None:
        self._run = run
        self._left = max_bytes
        self._answers: Json = {}
        self._groups: list[object] = []
        self._sequences: dict[str, object] = {}

    def fill(self) -> Json:
        """Everything about the whole, then groups and sequences while there is room."""
        for question in ("overview", "curves", "batches", "circle", "story"):
            self._keep(question, question, {})
        story = self._answers.get("story")
        first = story.get("group") if isinstance(story, dict) else None
        for group in [*([first] if first else []), *self._candidates()]:
            self._add_group(group)
        for order in UNUSUAL:
            for row in self._rows("sequences", {"sort": order})[: MAX_SEQUENCES // len(UNUSUAL)]:
                self._add_sequence(str(row["id"]))
        self._answers["groups"] = {"groups": self._groups}
        self._answers["sequences"] = {"sequences": list(self._sequences.values())}
        return self._answers

    def _candidates(self) -> Iterator[Json]:
        """Groups that are worth a look, of each kind in turn."""
        lists = [self._rows("groups", {"sort": order}) for order in ROWS_TO_TRY]
        for place in range(MAX_GROUPS // len(lists)):
            yield from (rows[place] for rows in lists if place < len(rows))

    def _rows(self, question: str, params: Params) -> list[Json]:
        rows = answer(self._run, question, params)[question]
        return rows if isinstance(rows, list) else []

    def _add_group(self, row: Json) -> None:
        group_id = str(row["group_id"])
        if f"group {group_id}" in self._answers or not self._keep(f"group {group_id}", "group", {"id": group_id}):
            return
        self._groups.append(row)
        self._left -= len(msgspec.json.encode(row))
        group = self._answers[f"group {group_id}"]
        rollouts = group["rollouts"] if isinstance(group, dict) else []
        for rollout in rollouts:
            self._keep(f"rollout {rollout['id']}", "rollout", {"id": str(rollout["id"])})
            for sequence in rollout["sequences"]:
                self._add_sequence(sequence)

    def _add_sequence(self, sequence_id: str) -> None:
        if not self._keep(f"sequence {sequence_id}", "sequence", {"id": sequence_id}):
            return
        sequence = self._answers[f"sequence {sequence_id}"]
        assert isinstance(sequence, dict)
        row_id = f"{sequence['step']}.{sequence['rank']}.{sequence['micro_batch']}"
        if self._keep(f"packed_row {row_id}", "packed_row", {"id": row_id}):
            rows = self._answers[f"packed_row {row_id}"]
            found = rows["sequences"] if isinstance(rows, dict) else []
            self._sequences |= {row["id"]: row for row in found if row["id"] == sequence_id}

    def _keep(self, key: str, question: str, params: Params) -> bool:
        """Whether the answer is in the report: it fits, and the run can give it."""
        if key in self._answers:
            return True
        try:
            found = answer(self._run, question, params)
        except ViewerError:
            return False
        size = len(msgspec.json.encode(found))
        if size > self._left and "id" in params:
            return False
        self._answers[key] = msgspec.to_builtins(found)
        self._left -= size
        return True
