import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st

from group_race import distance, standings
from tests.examples.traces import finished_trace, load_env, scored, tasks_of


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("abc", 4), ("abcd", 3), ("abx", 2), ("ab", 2), ("a", 1), ("xbc", 0), ("", 0), ("\x00", 0)],
)
def test_distance_counts_letters_before_the_first_mistake(reply: str, expected: int) -> None:
    assert distance(reply, "abc") == expected


def test_standing_is_the_share_of_the_others_that_are_beaten() -> None:
    assert standings([4, 0, 2]) == [1.0, 0.0, 0.5]
    assert standings([3, 3, 0]) == [0.75, 0.75, 0.0]
    assert standings([1, 1]) == [0.5, 0.5]


@given(st.lists(st.integers(0, 6), min_size=2, max_size=20))
def test_standings_share_out_the_same_prize_for_any_outcome(distances: list[int]) -> None:
    ranks = standings(distances)
    assert sum(ranks) / len(ranks) == pytest.approx(0.5)
    assert sorted(ranks) == [rank for _, rank in sorted(zip(distances, ranks, strict=True))]


def test_a_race_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        standings([1])
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        load_env("group-race", group_size=1)


async def test_alone_a_rollout_has_a_metric_and_no_reward() -> None:
    task = tasks_of(load_env("group-race"))[0]
    trace = await scored(task, task.data.answer)
    assert trace.rewards == {}
    assert trace.metrics == {"exact_match": 1.0}


async def test_reward_depends_on_the_siblings() -> None:
    env = load_env("group-race", group_size=3)
    task = tasks_of(env)[0]
    answer = task.data.answer

    async def rewards(*replies: str) -> list[float]:
        traces = [finished_trace(task, [reply]) for reply in replies]
        episode = vf.Episode(
            env=vf.EnvInfo(id="group-race"), task=vf.TraceTask(type="GroupRaceTask", data=task.data), traces=traces
        )
        await env.finalize(task, episode)
        return [trace.reward for trace in episode.traces]

    assert await rewards(answer[:3], "", answer) == [0.5, 0.0, 1.0]
    assert await rewards(answer[:3], "", "") == [1.0, 0.25, 0.25]
    assert await rewards(answer, answer, answer) == [0.5, 0.5, 0.5]
