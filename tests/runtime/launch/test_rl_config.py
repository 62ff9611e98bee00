"""How the keys of `rl.toml` reach the services."""

from pathlib import Path

import pytest

from runtime.cli import ensure_token, plan_launch, prepare_command, run, write_configs
from runtime.config.config import ServiceConfig, load_config, parse_config
from runtime.errors import UserError
from runtime.launch.rl_config import (
    RlConfig,
    ServiceSpec,
    compose,
    default_token_file,
    find_services,
    in_start_order,
    reference,
)
from runtime.run_dir.run_dir import RunDir

FILE = """
max_steps = 7
seed = 3
stall_timeout_s = 20.0
[run]
name = "t"
[log]
level = "DEBUG"
[model]
path = "models/tiny"
[[orchestrator.envs]]
id = "copy-text"
[trainer]
seed = 5
[trainer.log]
json_lines = true
"""


@pytest.fixture
def rl_toml(tmp_path: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(FILE)
    return path


def load(rl_toml: Path, *argv: str) -> RlConfig:
    return parse_config(compose(find_services()), ["@", str(rl_toml), *argv], prog="rl")


def value(config: RlConfig, key: str) -> object:
    """The value of a dotted key such as `trainer.optimizer.lr`."""
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def test_services_are_found_in_start_order() -> None:
    assert [spec.name for spec in find_services()] == ["inference", "orchestrator", "trainer"]
    assert [spec.ends_by_itself for spec in find_services()] == [False, True, True]
    assert [spec.module for spec in find_services()] == ["inference", "orchestrator", "trainer"]


def test_servers_start_before_those_that_end() -> None:
    class Counting(ServiceConfig):
        max_steps: int = 1
        """Steps."""

    specs = [ServiceSpec("a", "a", Counting), ServiceSpec("z", "z", ServiceConfig)]
    assert [spec.name for spec in in_start_order(specs)] == ["z", "a"]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("inference.run.name", "t"),
        ("orchestrator.run.name", "t"),
        ("trainer.run.name", "t"),
        ("inference.model.path", Path("models/tiny")),
        ("orchestrator.model.path", Path("models/tiny")),
        ("trainer.model.path", Path("models/tiny")),
        ("orchestrator.max_steps", 7),
        ("trainer.max_steps", 7),
        ("inference.seed", 3),
        ("orchestrator.seed", 3),
        ("trainer.seed", 5),
        ("orchestrator.stall_timeout_s", 20.0),
        ("inference.log.level", "DEBUG"),
        ("trainer.log.level", "DEBUG"),
        ("trainer.log.json_lines", True),
        ("orchestrator.log.json_lines", False),
        ("inference.admin_token_file", Path("runs/t/secrets/admin.token")),
        ("orchestrator.admin_token_file", Path("runs/t/secrets/admin.token")),
        ("orchestrator.engines.urls", ("http://127.0.0.1:8000",)),
        ("orchestrator.engines.start_timeout_s", 300.0),
        ("trainer.orchestrator.endpoint", "tcp://127.0.0.1:29600"),
    ],
)
def test_shared_keys_flow_into_services(rl_toml: Path, key: str, expected: object) -> None:
    assert value(load(rl_toml), key) == expected


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        (["--inference.server.port", "8123"], "orchestrator.engines.urls", ("http://127.0.0.1:8123",)),
        (["--inference.server.host", "::1"], "orchestrator.engines.urls", ("http://[::1]:8000",)),
        (["--orchestrator.engines.urls", "http://gpu:1"], "orchestrator.engines.urls", ("http://gpu:1",)),
        (["--orchestrator.server.endpoint", "tcp://127.0.0.1:5"], "trainer.orchestrator.endpoint", "tcp://127.0.0.1:5"),
        (["--trainer.orchestrator.endpoint", "tcp://h:6"], "trainer.orchestrator.endpoint", "tcp://h:6"),
        (["--orchestrator.max-steps", "9"], "trainer.max_steps", 9),
        (["--max-steps", "11"], "trainer.max_steps", 11),
        (["--max-steps", "11"], "orchestrator.max_steps", 11),
        (["--trainer.model.path", "other"], "trainer.model.path", Path("other")),
        (["--trainer.model.seq-len", "64"], "trainer.model.path", Path("models/tiny")),
        (["--run.dir", "/data"], "inference.admin_token_file", Path("/data/t/secrets/admin.token")),
        (["--admin-token-file", "my.token"], "orchestrator.admin_token_file", Path("my.token")),
        (["--start-timeout-s", "44"], "trainer.orchestrator.connect_timeout_s", 44.0),
    ],
)
def test_flags_and_links(rl_toml: Path, flags: list[str], key: str, expected: object) -> None:
    assert value(load(rl_toml, *flags), key) == expected


def test_port_zero_becomes_a_free_port_that_all_agree_on(rl_toml: Path) -> None:
    flags = ["--inference.server.port", "0", "--orchestrator.server.endpoint", "tcp://127.0.0.1:0"]
    config = load(rl_toml, *flags)
    port = value(config, "inference.server.port")
    endpoint = value(config, "orchestrator.server.endpoint")
    assert isinstance(port, int)
    assert port > 0
    assert value(config, "orchestrator.engines.urls") == (f"http://127.0.0.1:{port}",)
    assert endpoint == value(config, "trainer.orchestrator.endpoint")
    assert not str(endpoint).endswith(":0")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trainer.optimizer.r", "1"], "unknown key trainer.optimizer.r; did you mean trainer.optimizer.lr?"),
        (["--max_step", "1"], "unknown key max_step; did you mean max_steps?"),
        (["--model.pth", "x"], "unknown key model.pth; did you mean model.path?"),
        (["--trainer.max-steps", "x"], "trainer.max_steps: Input should be a valid integer"),
        (["--run.name", "a/b"], "run.name: String should match"),
    ],
)
def test_mistakes_name_the_key_the_user_wrote(rl_toml: Path, flags: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(rl_toml, *flags)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("flags", "key"), [(["--run.name", "a/b"], "run.name"), (["--seed", "-1"], "seed")])
def test_wrong_shared_key_is_reported_once(rl_toml: Path, flags: list[str], key: str) -> None:
    with pytest.raises(UserError) as caught:
        load(rl_toml, *flags)
    assert str(caught.value).startswith(f"{key}: ")
    assert ";" not in str(caught.value)


def test_missing_shared_key_is_reported_once() -> None:
    with pytest.raises(UserError, match=r"^model\.path is required; orchestrator\.envs is required$"):
        parse_config(compose(find_services()), [], prog="rl")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "^no config given: `rl @ FILE` starts a run"),
        (["doctr", "runs/x"], "^doctr is not a command of `rl`; did you mean rl doctor[?]$"),
        (["x.toml"], "^x.toml is not a command of `rl`; a config file is given as `rl @ FILE`$"),
        (["view.toml"], "^view.toml is not a command of `rl`; a config file is given as `rl @ FILE`$"),
    ],
)
def test_first_words_of_a_newcomer_are_answered_with_what_to_type(argv: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        run(argv)


def test_service_that_is_not_a_table_is_reported(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text('trainer = 3\nmodel.path = "m"\n')
    with pytest.raises(UserError, match="trainer: expected a table"):
        load(tmp_path / "rl.toml")


def test_written_configs_load_to_the_same_values(rl_toml: Path, tmp_path: Path) -> None:
    config = load(rl_toml, "--run.dir", str(tmp_path))
    run_dir = RunDir(config.run.path).create()
    write_configs(config, run_dir)
    for spec in find_services():
        loaded = load_config(spec.config_class, ["@", str(run_dir.config / f"{spec.name}.json")], prog=spec.name)
        assert loaded == config.services[spec.name]


def test_token_is_made_once_and_for_the_owner_only(rl_toml: Path, tmp_path: Path) -> None:
    config = load(rl_toml, "--run.dir", str(tmp_path))
    run_dir = RunDir(config.run.path).create()
    ensure_token(config, run_dir)
    token = run_dir.admin_token.read_text()
    ensure_token(config, run_dir)
    assert run_dir.admin_token.read_text() == token
    assert len(token) >= 32
    assert run_dir.admin_token.stat().st_mode & 0o777 == 0o600


def test_token_file_that_the_user_names_must_exist(rl_toml: Path, tmp_path: Path) -> None:
    config = load(rl_toml, "--run.dir", str(tmp_path), "--admin-token-file", "no.token")
    with pytest.raises(UserError, match=r"admin_token_file = no\.token does not exist"):
        ensure_token(config, RunDir(config.run.path).create())


def test_several_ranks_are_started_by_torchrun(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    trainer = find_services()[-1]
    plain = plan_launch(trainer, run_dir, 1).command
    assert plain[1:] == ("-m", "trainer", "@", f"{tmp_path}/config/trainer.json")
    ranks = plan_launch(trainer, run_dir, 2).command
    assert ranks[1:5] == ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert ranks[-4:] == plain[-4:]
    assert plan_launch(find_services()[0], run_dir, 2).command[2] == "inference"


def test_prepare_runs_only_without_a_model(rl_toml: Path, tmp_path: Path) -> None:
    flags = ["--prepare", "python,-m,tiny_models"]
    assert prepare_command(load(rl_toml, *flags))[1:] == ("-m", "tiny_models")
    assert prepare_command(load(rl_toml, *flags))[0] != "python"
    assert prepare_command(load(rl_toml, *flags, "--model.path", str(tmp_path))) == ()


def test_default_token_file_of_an_invalid_run_is_left_to_validation() -> None:
    assert default_token_file({"run": {"name": "../x"}}) is None
    assert default_token_file({"run": 3}) is None
    assert default_token_file({}) == "runs/default/secrets/admin.token"


PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: python -m runtime.launch.rl_config > docs/configuration.md"
