"""What people can mend is raised on every rank, whatever subclass of it rank 0 met."""

from __future__ import annotations

from typing import Any

import pytest

from mdapo.errors import NothingLearnableError, StorageError, UserError
from mdapo.rollout.sglang_server import ServerFailed
from mdapo.trainer.flow import Trainer
from mdapo.trainer.signals import Interrupted


def rank(*, lead: bool, said: list[Any]) -> Trainer:
    """With a wire that remembers what rank 0 said, and says it to others."""
    trainer = Trainer.__new__(Trainer)
    trainer.is_lead = lead

    def agree(values: dict[str, Any]) -> dict[str, Any]:
        if lead:
            said.append(values)
        return said[-1]

    trainer.agree = agree  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerFailed("it ended"), UserError),
        (UserError(["one", "two"]), UserError),
        (StorageError("full"), StorageError),
        (Interrupted("stop"), Interrupted),
        (NothingLearnableError("none"), NothingLearnableError),
    ],
)
def test_every_rank_raises_it(error: Exception, kind: type[Exception]) -> None:
    said: list[Any] = []

    def fails() -> None:
        raise error

    for lead in (True, False):
        with pytest.raises(kind) as caught:
            rank(lead=lead, said=said).share_errors(fails)
        assert str(caught.value) == str(error)


def test_without_one_rank_0_has_its_result_and_the_others_go_on() -> None:
    said: list[Any] = []
    assert rank(lead=True, said=said).share_errors(lambda: 3) == 3
    assert rank(lead=False, said=said).share_errors(lambda: 3) is None
