"""What pages are told about a run."""

import json
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.viewer.generated_run import Shape, byte_tokenizer, lines, make_run
from trainer.observe.token_export import TokenRecord
from transport.wire.ledger import Dispatched, Record, Settled
from viewer.answers.answers import ANSWERS, answer
from viewer.answers.curves import MAX_POINTS, charts
from viewer.answers.groups import MAX_CHARS, Said, conversation
from viewer.answers.overview import count_fates
from viewer.answers.sequences import FLAGS, GIVEN, NAMES, NUMBERS, PLACE, push
from viewer.errors import NotRecorded, ViewerError
from viewer.index.records import TokenHead
from viewer.index.run import PART_OF_CHARACTER, Run, TokenText


def groups_of(run: Run, **params: str) -> list[dict]:
    return answer(run, "groups", params)["groups"]


def test_story_shows_a_good_and_a_bad_rollout_of_one_early_group(generated: Run) -> None:
    story = answer(generated, "story", {})
    good, bad = (answer(generated, "rollout", {"id": story[kind]}) for kind in ("good", "bad"))
    assert good["group_id"] == bad["group_id"] == story["group"]["group_id"]
    assert good["advantage"] > 0 > bad["advantage"]
    assert good["sequences"]
    assert bad["sequences"]
    assert story["group"]["step"] <= 2
    assert story["rewards"]["last"] > story["rewards"]["first"]


def test_story_does_without_token_export(tmp_path: Path) -> None:
    with closing(Run(make_run(tmp_path / "run", Shape(with_tokens=False)), None)) as run:
        story = answer(run, "story", {})
    assert story["good"]
    assert story["bad"]


def test_a_run_that_has_recorded_nothing_yet_answers_everything(tmp_path: Path) -> None:
    for name in ("metrics", "rollouts", "services"):
        (tmp_path / "run" / name).mkdir(parents=True)
    with closing(Run(tmp_path / "run", None)) as run:
        for question in ANSWERS.keys() - {"group", "rollout", "sequence", "packed_row"}:
            assert msgspec.json.encode(answer(run, question, {}))


def test_groups_are_filtered_and_ordered(generated: Run) -> None:
    assert {group["env_name"] for group in groups_of(generated, env="maths")} == {"maths"}
    assert {group["step"] for group in groups_of(generated, step="3")} == {3}
    assert groups_of(generated, state="filtered") == []
    steps = [group["step"] for group in groups_of(generated)]
    assert steps == sorted(steps, reverse=True)
    assert groups_of(generated, sort="failed")[0]["num_failed"] == 1
    assert groups_of(generated, sort="worst")[0]["reward_mean"] == min(
        group["reward_mean"] for group in groups_of(generated)
    )


def test_pages_of_groups_hold_each_group_once(tmp_path: Path) -> None:
    with closing(Run(make_run(tmp_path / "run", Shape(num_steps=30, with_tokens=False)), None)) as run:
        pages = [answer(run, "groups", {"page": str(page)}) for page in range(3)]
    assert pages[0]["total"] == 120
    found = [(group["step"], group["group_id"]) for page in pages for group in page["groups"]]
    assert len(found) == len(set(found)) == 120


def test_group_has_its_prompt_and_its_rollouts_best_first_and_failures_with_their_reason(generated: Run) -> None:
    group = answer(generated, "group", {"id": "maths/example-0/1"})
    assert [said.text for said in group["prompt"]] == ["question 0"]
    rewards = [rollout.get("reward") for rollout in group["rollouts"]]
    assert rewards == [1.0, 0.0, 0.0, 0.0, None]
    assert group["rollouts"][-1]["message"] == "took <60 s>"
    assert group["rollouts"][-1]["sequences"] == []


def test_long_messages_are_cut_in_a_group_and_whole_in_their_rollout(tmp_path: Path) -> None:
    shape = Shape(num_steps=1, answer="x" * (MAX_CHARS + 1000), with_tokens=False)
    with closing(Run(make_run(tmp_path / "run", shape), None)) as run:
        rollout = answer(run, "group", {"id": "maths/example-0/1"})["rollouts"][0]
        whole = answer(run, "rollout", {"id": rollout["id"]})
    assert rollout["answer"][0].text.startswith("x" * MAX_CHARS + "… (1,002 more characters")
    assert whole["answer"][0].text == f"{shape.answer} 0"


def test_advantages_are_those_that_the_trainer_used(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", Shape(num_steps=1))
    exported = path / "token_export" / "step-00000001" / "rank-00000.jsonl"
    records = [json.loads(line) for line in exported.read_text().splitlines()]
    lines(exported, [record | {"advantage": [0.125] * len(record["advantage"])} for record in records])  # a critic's
    (path / "token_export" / "step-00000001" / "rank-00001.jsonl").unlink()
    with closing(Run(path, None)) as run:
        rollouts = answer(run, "group", {"id": "maths/example-0/1"})["rollouts"]
    assert {rollout["advantage"] for rollout in rollouts if rollout["sequences"]} == {0.125}
    assert 0.125 not in {rollout["advantage"] for rollout in rollouts if not rollout["sequences"]}


def test_sequences_are_found_by_mask_ratio_and_env(generated: Run) -> None:
    masked = answer(generated, "sequences", {"masked": "1"})["sequences"]
    assert masked
    assert all(row["num_masked"] == 1 and row["advantage"] < 0 for row in masked)
    by_ratio = [row["max_ratio"] for row in answer(generated, "sequences", {"sort": "ratio"})["sequences"]]
    assert by_ratio == sorted(by_ratio, reverse=True)
    assert by_ratio[0] == pytest.approx(1 + 7 + 0.6)
    assert {row["env_name"] for row in answer(generated, "sequences", {"env": "words"})["sequences"]} == {"words"}


def test_sequence_knows_its_text_its_numbers_and_its_rollout(generated: Run) -> None:
    sequence = answer(generated, "sequence", {"id": "2.1.0"})
    assert "".join(sequence["texts"]).replace(PART_OF_CHARACTER, "") == "ask é:the answer is <b>"
    columns = ("texts", "push", "ratio", "entropy", "is_masked", "loss_mask", "advantage", "log_ratio")
    assert len({len(sequence[name]) for name in columns}) == 1
    assert answer(generated, "rollout", {"id": sequence["rollout"]})["trajectory_id"] == sequence["trajectory_id"]


def test_packed_row_holds_the_sequences_of_one_micro_batch_without_overlap(generated: Run) -> None:
    rows = answer(generated, "packed_row", {"id": "2.1.1"})["sequences"]
    assert len(rows) == 4
    assert all((row["rank"], row["micro_batch"]) == (1, 1) for row in rows)
    ends = [row["position"] + row["num_tokens"] for row in rows]
    assert all(end <= row["position"] for end, row in zip(ends, rows[1:], strict=False))
    assert ends[-1] <= rows[0]["micro_batch_tokens"]


def test_push_is_large_for_unlikely_tokens_and_none_for_masked_or_untrained_ones() -> None:
    record = {
        "advantage": [2.0, 2.0, -1.0, 2.0],
        "ratio": [None, 1.0, 1.5, 1.0],
        "trainer_logprobs": [None, -3.0, -0.5, 0.0],
        "is_masked": [None, False, True, False],
    }
    untrained, unlikely, masked, sure = push(record)
    assert untrained is None
    assert unlikely == pytest.approx(2.0 * (1 - 0.049787), rel=1e-4)
    assert masked == 0.0
    assert sure == pytest.approx(0.0)


@pytest.mark.parametrize("text", ["plain words", "naïve café", "日本語 text", "👩‍🚀 flies", "\n\ttabs\n", ""])
def test_texts_of_tokens_add_up_to_the_text(text: str) -> None:
    core = byte_tokenizer()
    texts = TokenText(core).texts(core.encode(text).ids)
    assert "".join(one for one in texts if one != PART_OF_CHARACTER) == text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "words"}, Said("user", "words")),
        ({"role": "user", "content": None}, Said("user", "")),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}, Said("user", "ab")),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}, {"text": "?"}]},
            Said("user", "[image]?"),
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
            Said("assistant", 'tool_calls: {"name": "f"}'),
        ),
        ("stray", Said("?", "stray")),
    ],
)
def test_messages_of_any_shape_become_text(message: object, expected: Said) -> None:
    assert conversation([message]) == [expected]


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert TokenText(None).texts([5, 17]) == ["⟨5⟩", "⟨17⟩"]


@pytest.mark.parametrize(
    ("question", "params"),
    [
        ("rollout", {"id": "1"}),
        ("rollout", {"id": "../../etc/passwd.1"}),
        ("sequence", {"id": "1.0.x"}),
        ("sequence", {"id": "٣.0.0"}),
        ("groups", {"step": "-1"}),
        ("groups", {"step": "9" * 40}),
        ("groups", {"sort": "step; DROP TABLE groups"}),
        ("sequences", {"page": "1e9"}),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(generated: Run, question: str, params: dict[str, str]) -> None:
    with pytest.raises(ViewerError):
        answer(generated, question, params)


@pytest.mark.parametrize(
    ("question", "params"),
    [("rollout", {"id": "99.0"}), ("group", {"id": "' OR 1=1 --"}), ("sequence", {"id": "1.9.0"}), ("nothing", {})],
)
def test_what_is_not_recorded_is_said_to_be_missing(generated: Run, question: str, params: dict[str, str]) -> None:
    with pytest.raises(NotRecorded):
        answer(generated, question, params)


def test_curves_are_by_environment_and_a_step_trained_again_counts_once() -> None:
    rows = [{"step": step, "reward/all/mean": step, "reward/a/mean": 1, "reward/b/mean": 2} for step in (1, 2, 2, 3)]
    (reward,) = charts({"orchestrator": rows})
    assert [series.label for series in reward.series] == ["all", "a", "b"]
    assert reward.series[0].steps == [1, 2, 3]


def test_a_single_environment_is_drawn_once_and_evaluations_have_their_own_chart() -> None:
    rows = [{"step": 1, "reward/all/mean": 1, "reward/a/mean": 1, "eval_reward/held out/mean": 0.5}]
    shown = {chart.id: [series.label for series in chart.series] for chart in charts({"orchestrator": rows})}
    assert shown == {"reward": ["a"], "eval": ["held out"]}


def test_a_critic_has_charts_of_its_own_and_shares_that_of_the_gradient_norm() -> None:
    rows = [{"step": 1, "grad_norm": 1, "critic/grad_norm": 2, "loss/value": 3, "explained_variance/a": 0.5}]
    shown = {chart.id: [series.label for series in chart.series] for chart in charts({"trainer": rows})}
    assert shown == {"grad_norm": ["policy", "critic"], "value_loss": ["value loss"], "explained_variance": ["a"]}


def test_any_metric_can_be_drawn_by_its_name(generated: Run) -> None:
    found = answer(generated, "metric", {"id": "trainer: entropy/words/mean"})
    assert found["series"].values[:2] == [1.0, 0.5]
    assert "orchestrator: filtered/all/share" in found["names"]
    assert not {"trainer: step", "orchestrator: time"} & set(found["names"])
    assert answer(generated, "metric", {"id": "trainer: nothing"})["series"].steps == []


def test_long_curves_are_thinned_and_keep_their_mean() -> None:
    rows = [{"step": step, "loss": float(step % 10)} for step in range(1, 10_001)]
    (loss,) = charts({"trainer": rows})
    assert len(loss.series[0].steps) <= MAX_POINTS
    assert loss.series[0].steps[-1] == 10_000
    assert sum(loss.series[0].values) / len(loss.series[0].values) == pytest.approx(4.5, abs=0.01)


def test_fates_are_counted_over_all_steps_and_lines_that_are_none_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    ledger: list[Record] = [
        Dispatched(0, "g0", 2),
        Settled(0, ("trained@1", "filtered:x")),
        Dispatched(1, "g1", 1),
        Settled(1, ("trained@2",)),
        Dispatched(2, "g2", 3),
    ]
    encoded = [msgspec.json.encode(record) for record in ledger]
    path.write_bytes(b"\n".join([*encoded, b'{"kind":"newer"}', b'{"kind":"disp']))
    assert count_fates(path) == {"in_flight": 3, "trained": 2, "filtered:x": 1}
    assert count_fates(tmp_path / "none.jsonl") == {}


def test_new_files_of_a_live_run_show_up(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", Shape(num_steps=1))
    with closing(Run(path, None)) as run:
        run.index.refresh()
        assert len(groups_of(run)) == 4
        record = json.loads((path / "rollouts" / "step-00000001.jsonl").read_text().splitlines()[0])
        lines(path / "rollouts" / "step-00000002.jsonl", [record | {"group_id": "maths/new/0"}])
        run.index.refresh()
        assert groups_of(run)[0]["group_id"] == "maths/new/0"


def test_token_records_have_every_field_that_is_read() -> None:
    written = set(TokenRecord.__struct_fields__)
    assert set(TokenHead.__struct_fields__) <= written
    assert {*PLACE, *NAMES, *GIVEN, *NUMBERS, *FLAGS} <= written
