"""Scoring of the one-turn environments, with chosen replies."""

import math

import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st

from flaky_text import Fault, FlakyTaskConfig, fault_of
from group_race import distance, standings
from tests.examples.traces import finished_trace, load_env, scored, tasks_of
from text_puzzle import COPY, PUZZLES, REVERSE, TextPuzzle

ONE_TURN = ("reverse-text", "copy-text")


@pytest.mark.parametrize("env_id", ONE_TURN)
async def test_only_the_exact_answer_is_rewarded(env_id: str) -> None:
    task = tasks_of(load_env(env_id, num_examples=1))[0]
    answer = task.data.answer
    assert (await scored(task, answer)).reward == 1.0
    wrong = ["", None, answer[:-1], answer + "a", answer.upper(), f" {answer}", f"{answer}\n", "<|im_start|>", "\x00é"]
    assert [(await scored(task, reply)).reward for reply in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize("env_id", ONE_TURN)
async def test_trace_without_any_reply_is_worth_nothing(env_id: str) -> None:
    task = tasks_of(load_env(env_id, num_examples=1))[0]
    assert (await scored(task)).reward == 0.0


async def test_prompt_and_answer_belong_together() -> None:
    reverse, copy = (tasks_of(load_env(env_id))[0].data for env_id in ONE_TURN)
    assert reverse.prompt == f"reverse: {reverse.answer[::-1]}"
    assert copy.prompt == f"copy: {copy.answer}"


def test_questions_are_distinct_and_named_by_their_text() -> None:
    tasks = tasks_of(load_env("copy-text"))
    assert len(tasks) == 1024
    assert len({task.data.id for task in tasks}) == 1024
    assert all(task.data.prompt.endswith(f" {task.data.id}") for task in tasks)


def test_seed_and_sizes_can_be_set() -> None:
    def prompts(**args: object) -> list[str]:
        return [task.data.prompt for task in tasks_of(load_env("reverse-text", **args))]

    assert prompts(num_examples=50, seed=1) == prompts(num_examples=50, seed=1) != prompts(num_examples=50, seed=2)
    assert sorted(prompts(alphabet="xy", length=2)) == ["reverse: xx", "reverse: xy", "reverse: yx", "reverse: yy"]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"alphabet": "aa"}, "repeated letters"),
        ({"length": 0}, "greater than or equal to 1"),
        ({"num_examples": 0}, "greater than or equal to 1"),
        ({"lenght": 3}, "lenght"),
    ],
)
def test_impossible_settings_are_refused(args: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_env("copy-text", **args)


def test_more_questions_than_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="only 4 different texts exist"):
        tasks_of(load_env("copy-text", alphabet="ab", length=2, num_examples=5))


def flaky_tasks(**faults: float) -> list[vf.Task]:
    return tasks_of(load_env("flaky-text", num_examples=200, task=faults))


async def test_flaky_scoring_without_faults_is_that_of_copy_text() -> None:
    task = flaky_tasks(raise_rate=0.0)[0]
    assert (await scored(task, task.data.answer)).reward == 1.0
    assert (await scored(task, "wrong")).reward == 0.0


async def test_planned_failure_leaves_the_reward_uncomputed() -> None:
    task = flaky_tasks(raise_rate=1.0)[0]
    trace = finished_trace(task, [task.data.answer])
    with pytest.raises(vf.TaskError, match=r"PlannedError: scoring of '\w+' for \w+ fails on purpose"):
        await task.score(trace)
    assert trace.rewards == {"exact_match": None}


async def test_planned_nan_is_returned_as_the_reward() -> None:
    task = flaky_tasks(raise_rate=0.0, nan_rate=1.0)[0]
    assert math.isnan((await scored(task, task.data.answer)).reward)


async def test_planned_hang_lasts_as_long_as_set() -> None:
    task = flaky_tasks(raise_rate=0.0, hang_rate=1.0, hang_s=0.001)[0]
    assert (await scored(task, task.data.answer)).reward == 1.0


def test_faults_come_at_their_rates() -> None:
    config = FlakyTaskConfig(raise_rate=0.2, hang_rate=0.3, nan_rate=0.1)
    faults = [fault_of(config, str(number), "reply") for number in range(4000)]
    shares = {fault: faults.count(fault) / len(faults) for fault in Fault}
    assert shares == pytest.approx({Fault.RAISE: 0.2, Fault.HANG: 0.3, Fault.NAN: 0.1, Fault.NONE: 0.4}, abs=0.03)


def test_faults_are_decided_by_seed_example_and_reply() -> None:
    def fates(seed: int, example_id: str) -> list[Fault]:
        config = FlakyTaskConfig(raise_rate=0.5, fault_seed=seed)
        return [fault_of(config, example_id, f"reply {number}") for number in range(64)]

    assert fates(0, "abc") == fates(0, "abc")
    assert fates(0, "abc") != fates(1, "abc")
    assert fates(0, "abc") != fates(0, "abd")
    assert set(fates(0, "abc")) == {Fault.NONE, Fault.RAISE}


def test_rates_beyond_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"add up to 1\.1"):
        load_env("flaky-text", task={"raise_rate": 0.5, "hang_rate": 0.6})


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


def test_right_answers() -> None:
    assert REVERSE.answer("abcd") == "dcba"
    assert COPY.answer("abcde") == "abcde"
    assert (REVERSE.prompt("abcd"), COPY.prompt("ab")) == ("reverse: abcd", "copy: ab")


def test_puzzles_are_found_by_the_id_of_their_environment() -> None:
    assert dict(PUZZLES) == {"reverse-text": REVERSE, "copy-text": COPY}


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=PUZZLES.keys())
def test_numbers_name_every_text_once(puzzle: TextPuzzle) -> None:
    texts = {puzzle.text(number) for number in range(puzzle.num_texts)}
    assert len(texts) == puzzle.num_texts
    assert all(len(text) == puzzle.length and set(text) <= set(puzzle.alphabet) for text in texts)


def test_sample_is_distinct_and_decided_by_its_seed() -> None:
    texts = REVERSE.sample(1000, seed=3)
    assert len(set(texts)) == 1000
    assert texts == REVERSE.sample(1000, seed=3)
    assert texts != REVERSE.sample(1000, seed=4)


def test_sample_larger_than_the_puzzle_is_refused() -> None:
    assert len(set(REVERSE.sample(REVERSE.num_texts, seed=0))) == 6**4
    with pytest.raises(ValueError, match="only 1296 different texts exist, 1297 were asked for"):
        REVERSE.sample(REVERSE.num_texts + 1, seed=0)


def test_resizing_keeps_what_is_not_given() -> None:
    assert COPY.resized("xy", None) == TextPuzzle("copy-text", "copy", "xy", 5, COPY.transform)
    assert COPY.resized(None, 3).num_texts == 8**3


@pytest.mark.parametrize(("alphabet", "length"), [("aab", 3), ("", 3), ("ab", 0)])
def test_impossible_puzzles_cannot_be_built(alphabet: str, length: int) -> None:
    with pytest.raises(ValueError, match="odd"):
        TextPuzzle("odd", "do", alphabet, length, str.upper)
