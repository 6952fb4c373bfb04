"""A step's samples end to end: where each row is, how far it goes, and whether it trains."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdapo.data.shares import FIELDS, rows_of
from mdapo.types import Sample, Samples

# Tokens of a sample: whether the policy wrote it, and its weight.
Tokens = list[tuple[bool, float]]


def sample(number: int, tokens: Tokens) -> Sample:
    size = len(tokens)
    return Sample(
        uid=str(number),
        group=number,
        ids=np.arange(size, dtype=np.int32) + 100 * number,
        response_mask=np.array([scored for scored, _ in tokens], bool),
        rollout_logps=np.full(size, -1.0, np.float32),
        versions=np.zeros(size, np.int32),
        advantages=np.ones(size, np.float32),
        loss_weights=np.array([weight for _, weight in tokens], np.float32),
    )


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, -0.0, 0.5, -1.0])), max_size=6), max_size=8))
def test_a_row_ends_at_its_last_scored_token_and_trains_if_one_has_weight(drawn: list[Tokens]) -> None:
    """Also beside samples without tokens, or none of the policy's."""
    rows = rows_of(Samples.of([sample(i, tokens) for i, tokens in enumerate(drawn)]))
    for i, tokens in enumerate(drawn):
        scored = [at for at, (written, _) in enumerate(tokens) if written]
        assert rows.scored_N[i] == len(scored)
        assert rows.lengths_N[i] == (scored[-1] + 1 if scored else 0)
        assert rows.trains_N[i] == any(tokens[at][1] != 0 for at in scored)
        ids = rows.fields["ids"][rows.starts_N[i] :][: len(tokens)]
        assert ids.tolist() == [100 * i + at for at in range(len(tokens))]
    assert {name: field.dtype for name, field in rows.fields.items()} == {n: np.dtype(t) for n, t in FIELDS.items()}
    assert {len(field) for field in rows.fields.values()} == {sum(map(len, drawn))}
