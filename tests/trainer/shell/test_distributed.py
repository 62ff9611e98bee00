from pathlib import Path

import pytest
import torch.distributed as dist

from runtime.errors import PeerLostError, StorageError
from tests.trainer.shell.runs import torchrun
from tests.trainer.shell.tiny import ALONE


def test_a_plain_process_is_a_group_of_its_own():
    assert ALONE.gather(b"mine") == [b"mine"]
    assert ALONE.together(lambda: b"mine") == [b"mine"]
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.mesh() is None
    ALONE.require_same("anything", "a value")
    ALONE.barrier()


def test_a_failing_disk_is_a_storage_error_that_names_the_rank():
    def refuse() -> bytes:
        raise OSError("no space left")

    with pytest.raises(StorageError, match="rank 0: no space left"):
        ALONE.together(refuse)


@pytest.mark.integration
def test_two_ranks_exchange_bytes_and_fail_together(tmp_path, start):
    said = tmp_path / "said"
    said.mkdir()
    start(*torchrun(2, str(Path(__file__).with_name("rank_checks.py")), str(said))).finish(within_s=120)
    assert {path.read_text() for path in said.iterdir()} == {"0 of 2, first: True", "1 of 2, first: False"}


GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9123"


@pytest.mark.parametrize("error", [RuntimeError(GLOO), dist.DistBackendError("NCCL error"), dist.DistNetworkError("x")])
def test_failed_collective_is_a_lost_peer_wherever_it_was_called(error: RuntimeError):
    with pytest.raises(PeerLostError, match="rank 0 lost another rank: "), ALONE.together_with_peers():
        raise error


def test_other_errors_are_not_blamed_on_peers():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), ALONE.together_with_peers():
        raise RuntimeError("shapes cannot be multiplied")
