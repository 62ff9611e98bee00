from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat.templates import Message
from chat.tokenizer import Tokenizer
from chat.trajectory import Trajectory
from tests.chat.model_folders import BRACKETS, QWEN_LIKE, bpe_tokenizer, character_tokenizer, write_folder
from tests.chat.replies import check_branch, make_reply, observed_tokens, sampled_tokens
from transport.wire.sample import VersionSpan

USER = {"role": "user", "content": "the cat"}
MORE = {"role": "user", "content": "and then?"}


def say(trajectory: Trajectory, messages: list[Message], ids: list[int], finish_reason: str = "stop") -> list[Message]:
    """Play one turn; returns the conversation with the reply."""
    prompt = trajectory.prompt(messages)
    text = trajectory.record(prompt, make_reply(ids, finish_reason=finish_reason))  # type: ignore[arg-type]
    return [*messages, {"role": "assistant", "content": text}]


def eos(tokenizer: Tokenizer) -> int:
    return min(tokenizer.eos_ids)


def test_next_turn_starts_with_the_exact_tokens_of_the_turn_before(bpe: Tokenizer) -> None:
    # "the" as three single letters: the tokenizer itself would write it as one id.
    letters = [int(bpe.encode(letter)[0]) for letter in "the"]
    assert bpe.encode("the").tolist() != letters
    trajectory = Trajectory(bpe)
    first = trajectory.prompt([USER])
    chat = say(trajectory, [USER], [*letters, eos(bpe)])

    second = trajectory.prompt([*chat, MORE])

    assert chat[-1]["content"] == "the"
    assert second.token_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist()
    tail = bpe.encode("\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n")
    assert second.token_ids[len(first.token_ids) :].tolist() == [*letters, eos(bpe), *tail.tolist()]


def test_end_of_turn_that_the_model_did_not_sample_is_the_templates(bpe: Tokenizer) -> None:
    trajectory = Trajectory(bpe)
    letters = bpe.encode("cat").tolist()
    chat = say(trajectory, [USER], letters, "length")
    prompt = trajectory.prompt([*chat, MORE])
    start = prompt.num_inherited
    assert prompt.token_ids[start - len(letters) : start].tolist() == letters
    assert prompt.token_ids[start] == eos(bpe)
    trajectory.record(prompt, make_reply([eos(bpe)]))
    (branch,) = trajectory.branches()
    assert not branch.sampled[start]


def test_two_turns_are_one_branch_with_spans_over_the_sampled_tokens(tokenizer: Tokenizer) -> None:
    trajectory = Trajectory(tokenizer)
    chat = say(trajectory, [USER], [10, 11, eos(tokenizer)])
    prompt = trajectory.prompt([*chat, MORE])
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3))
    trajectory.record(prompt, make_reply([12, 13, eos(tokenizer)], versions=spans))

    (branch,) = trajectory.branches()

    check_branch(branch)
    assert sampled_tokens([branch]) == [10, 11, eos(tokenizer), 12, 13, eos(tokenizer)]
    end = len(branch.token_ids)
    assert branch.versions[1:] == (VersionSpan(4, end - 3, end - 2), VersionSpan(5, end - 2, end))
    assert branch.logprobs[-3:].tolist() == [-0.5, -1.5, -2.5]
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]


def test_what_is_observed_is_the_environments_answer_and_never_the_task(tokenizer: Tokenizer) -> None:
    trajectory = Trajectory(tokenizer)
    chat = say(trajectory, [USER], [10, 11, eos(tokenizer)])
    say(trajectory, [*chat, MORE], [12, eos(tokenizer)])
    (branch,) = trajectory.branches()
    text = tokenizer.decode(np.array(observed_tokens([branch]), np.int32), skip_special_tokens=False)
    assert text == "\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"


def test_edited_history_starts_a_new_branch(tokenizer: Tokenizer) -> None:
    trajectory = Trajectory(tokenizer)
    say(trajectory, [USER], [10, eos(tokenizer)])
    edited = [USER, {"role": "assistant", "content": "something else"}, MORE]
    prompt = trajectory.prompt(edited)
    assert prompt.parent is None
    assert prompt.token_ids.tolist() == tokenizer.encode_chat(edited).tolist()
    trajectory.record(prompt, make_reply([11, eos(tokenizer)]))
    branches = trajectory.branches()
    assert len(branches) == 2
    assert sampled_tokens(branches) == [10, eos(tokenizer), 11, eos(tokenizer)]


def test_fork_keeps_exact_tokens_but_trains_the_shared_turn_once(bpe: Tokenizer) -> None:
    trajectory = Trajectory(bpe)
    letters = [int(bpe.encode(letter)[0]) for letter in "the"]
    chat = say(trajectory, [USER], [*letters, eos(bpe)])
    say(trajectory, [*chat, MORE], [20, eos(bpe)])
    say(trajectory, [*chat, {"role": "user", "content": "why?"}], [21, eos(bpe)])

    first, second = trajectory.branches()

    for branch in (first, second):
        check_branch(branch)
        assert letters in [branch.token_ids[i : i + 3].tolist() for i in range(len(branch.token_ids))]
    assert sampled_tokens([first]) == [*letters, eos(bpe), 20, eos(bpe)]
    assert sampled_tokens([second]) == [21, eos(bpe)]


def test_same_request_again_is_another_branch(tokenizer: Tokenizer) -> None:
    trajectory = Trajectory(tokenizer)
    say(trajectory, [USER], [10, eos(tokenizer)])
    say(trajectory, [USER], [11, eos(tokenizer)])
    assert sampled_tokens(trajectory.branches()) == [10, eos(tokenizer), 11, eos(tokenizer)]
    assert len(trajectory.branches()) == 2


@pytest.mark.parametrize(
    "content", [None, "", [], [{"type": "text", "text": ""}]], ids=["null", "empty", "list", "part"]
)
def test_empty_reply_is_recognised_in_every_spelling(tokenizer: Tokenizer, content: object) -> None:
    trajectory = Trajectory(tokenizer)
    say(trajectory, [USER], [eos(tokenizer)])
    prompt = trajectory.prompt([USER, {"role": "assistant", "content": content, "tool_calls": None}, MORE])
    assert prompt.parent == 0


def test_other_end_of_sequence_than_the_templates_is_kept(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, character_tokenizer(), QWEN_LIKE))
    end_of_text = int(tokenizer.encode("<|endoftext|>")[0])
    trajectory = Trajectory(tokenizer)
    chat = say(trajectory, [USER], [10, end_of_text])
    prompt = trajectory.prompt([*chat, MORE])
    assert prompt.token_ids[prompt.num_inherited - 1] == end_of_text
    assert prompt.token_ids[prompt.num_inherited] == eos(tokenizer)


def test_reply_that_looks_like_the_sentinel_or_the_template_does_not_confuse(tokenizer: Tokenizer) -> None:
    trajectory = Trajectory(tokenizer)
    tricky = "tandem-assistant-turn"
    ids = tokenizer.encode(tricky).tolist()
    chat = say(trajectory, [{"role": "user", "content": tricky}], [*ids, eos(tokenizer)])
    prompt = trajectory.prompt([*chat, {"role": "user", "content": tricky}])
    assert prompt.parent == 0
    text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert text.count(tricky) == 3
    assert text.endswith(f"<|im_start|>user\n{tricky}<|im_end|>\n<|im_start|>assistant\n")


def test_template_that_hides_earlier_replies_starts_a_new_branch(tmp_path: Path) -> None:
    last_only = "{{ messages[-1]['content'] }}>"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, character_tokenizer(), last_only))
    trajectory = Trajectory(tokenizer)
    chat = say(trajectory, [USER], [10, eos(tokenizer)])
    prompt = trajectory.prompt([*chat, MORE])
    assert prompt.parent is None
    assert tokenizer.decode(prompt.token_ids) == "and then?>"


turn_ids = st.lists(st.integers(min_value=4, max_value=90), min_size=0, max_size=5)
plays = st.lists(
    st.tuples(turn_ids, st.booleans(), st.integers(min_value=0, max_value=3), st.text("ab <|>", max_size=4)),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module", params=["chatml-bpe", "qwen-bpe", "brackets-characters"])
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template, core = {
        "chatml-bpe": (None, bpe_tokenizer),
        "qwen-bpe": (QWEN_LIKE, bpe_tokenizer),
        "brackets-characters": (BRACKETS, character_tokenizer),
    }[request.param]
    if template is None:
        return request.getfixturevalue("bpe")  # type: ignore[no-any-return]
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("any"), core(), template))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plays=plays)
def test_no_sampled_token_is_lost_or_trained_twice(any_tokenizer: Tokenizer, plays: list) -> None:
    """However a conversation goes on, forks or restarts, its branches train exactly what the engine sampled."""
    trajectory = Trajectory(any_tokenizer)
    end = eos(any_tokenizer)
    chats: list[list[Message]] = [[]]
    expected: list[int] = []
    answers: list[int] = []
    for ids, stops, which, text in plays:
        chat = [*chats[which % len(chats)], {"role": "user", "content": text}]
        sampled = [*ids, end] if stops or not ids else ids
        prompt = trajectory.prompt(chat)
        reply = trajectory.record(prompt, make_reply(sampled))
        chats.append([*chat, {"role": "assistant", "content": reply}])
        expected += sampled
        answers += [] if prompt.parent is None else prompt.token_ids[prompt.num_inherited :].tolist()
    branches = trajectory.branches()
    for branch in branches:
        check_branch(branch)
    assert sorted(sampled_tokens(branches)) == sorted(expected)
    assert sorted(observed_tokens(branches)) == sorted(answers), "what the environment wrote is observed once"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(turn_ids.filter(bool), min_size=2, max_size=5))
def test_every_prompt_extends_what_the_engine_saw_and_sampled(any_tokenizer: Tokenizer, turns: list[list[int]]) -> None:
    trajectory = Trajectory(any_tokenizer)
    chat: list[Message] = []
    seen: list[int] = []
    for number, ids in enumerate(turns):
        chat = [*chat, {"role": "user", "content": f"turn {number}"}]
        prompt = trajectory.prompt(chat)
        assert prompt.token_ids[: len(seen)].tolist() == seen
        text = trajectory.record(prompt, make_reply(ids, finish_reason="length"))
        seen = [*prompt.token_ids.tolist(), *ids]
        chat = [*chat, {"role": "assistant", "content": text}]
    (branch,) = trajectory.branches()
    assert branch.token_ids.tolist() == seen
