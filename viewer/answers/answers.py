"""Every question that a page can ask about a run, by name. The live server and the offline file answer alike."""

from collections.abc import Callable

from viewer.answers.groups import list_groups, show_group, show_rollout
from viewer.answers.overview import show_batches, show_circle, show_curves, show_metric, show_overview, show_story
from viewer.answers.params import Params
from viewer.answers.sequences import list_sequences, show_packed_row, show_sequence
from viewer.errors import NotRecorded, reading
from viewer.index.run import Json, Run

AnswerFunction = Callable[[Run, Params], Json]

ANSWERS: dict[str, AnswerFunction] = {
    "overview": show_overview,
    "story": show_story,
    "curves": show_curves,
    "metric": show_metric,
    "circle": show_circle,
    "batches": show_batches,
    "groups": list_groups,
    "group": show_group,
    "rollout": show_rollout,
    "sequences": list_sequences,
    "sequence": show_sequence,
    "packed_row": show_packed_row,
}


def answer(run: Run, question: str, params: Params) -> Json:
    """Answer `question` about the run as it is now. Raises `ViewerError`."""
    if question not in ANSWERS:
        raise NotRecorded(f"no such question: {question}")
    with reading():
        run.refresh()
        return ANSWERS[question](run, params)
