"""The order of test files: what takes long begins early, so that no process of the session waits for another's last."""

import pytest


def test_files_that_start_processes_come_before_all_others(request: pytest.FixtureRequest) -> None:
    """Of the files of this session, however many they are."""
    if request.config.getoption("failedfirst") or request.config.getoption("newfirst"):
        pytest.skip("another order was asked for")
    long = {item.path for item in request.session.items if item.get_closest_marker("integration")}
    ranks = [item.path not in long for item in request.session.items]
    assert ranks == sorted(ranks)
