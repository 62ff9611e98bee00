"""The offline file: whole, bounded, and nothing in its data can become markup or script."""

import json
import re
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.viewer.generated_run import Shape, make_run
from viewer.index.run import Run
from viewer.views.assets import assets, bundle
from viewer.views.report import document, escape_script, make_report

HOSTILE = "</script><script>window.hacked = 1</script><!--<img src=x onerror=alert(1)>&amp;\u2028"
NAME = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) ([A-Za-z_]\w*)", re.MULTILINE)


class Elements(HTMLParser):
    """Start tags, and the text of each script element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data


def embedded(text: str) -> dict:
    return json.loads(re.search(r'id="embedded">(.*?)</script>', text, re.DOTALL)[1])


def test_report_holds_what_its_first_page_needs(generated: Run) -> None:
    answers = embedded(make_report([generated], max_bytes=4_000_000))["answers"][0]
    story = answers["story"]
    group = answers[f"group {story['group']['group_id']}"]
    assert {story["good"], story["bad"]} <= {rollout["id"] for rollout in group["rollouts"]}
    for rollout in group["rollouts"]:
        assert f"rollout {rollout['id']}" in answers
        assert all(f"sequence {sequence}" in answers for sequence in rollout["sequences"])
    assert len(answers["groups"]["groups"]) == 24
    assert all(f"sequence {row['id']}" in answers for row in answers["sequences"]["sequences"])


@pytest.mark.parametrize("max_bytes", [0, 60_000, 200_000])
def test_report_keeps_to_its_size_and_always_has_the_whole(generated: Run, max_bytes: int) -> None:
    whole = 40_000  # curves and batches of this run, the page itself
    text = make_report([generated], max_bytes)
    data = json.dumps(embedded(text)["answers"], separators=(",", ":"))
    assert len(data) < max_bytes + whole
    assert {"overview", "curves", "story", "circle", "batches"} <= embedded(text)["answers"][0].keys()


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    shape = Shape(num_steps=1, answer=HOSTILE, envs=(HOSTILE.replace("/", "|"),))
    with closing(Run(make_run(tmp_path / "run", shape), None)) as run:
        text = make_report([run], 1_000_000)
    plain = document("title", "{}")
    assert Elements(text).tags == Elements(plain).tags
    assert HOSTILE in json.dumps(embedded(text), ensure_ascii=False)


def test_title_is_escaped() -> None:
    assert "<title>&lt;/title&gt;&lt;script&gt; · Tandem</title>" in document("</title><script>", "{}")


def test_escaped_json_is_the_same_json() -> None:
    assert json.loads(escape_script(json.dumps({"a": HOSTILE}, ensure_ascii=False))) == {"a": HOSTILE}


def test_file_forbids_every_connection() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', document("t", "{}"))[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    assert "http" not in policy


def test_script_is_whole_and_no_two_modules_share_a_name() -> None:
    script = bundle()
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    modules = {name: text for name, text in assets().items() if name.endswith(".js")}
    assert all(f"// {name}\n" in script for name in modules)
    names = [name for text in modules.values() for name in NAME.findall(text)]
    assert sorted(names) == sorted(set(names))


def test_no_module_parses_html_or_code() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc"
    code = r"\beval\b|new Function|javascript:"
    assert [name for name, text in assets().items() if re.search(f"{markup}|{code}", text)] == []


def test_page_names_no_other_host() -> None:
    hosts = {name: re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*", text) for name, text in assets().items()}
    assert {host for found in hosts.values() for host in found} <= {"http://www.w3.org/2000/svg"}
