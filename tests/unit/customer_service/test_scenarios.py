"""The shipped scenarios are what the generator makes, varied, and held-out ones are held out."""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mdapo.rewards.dialogue import follow
from mdapo.rewards.dialogue_lexicon import DETAILS, REMEDIES
from mdapo.rewards.dialogue_reading import Facts, plain
from mdapo.types import Message

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import make_scenarios  # noqa: E402
import scenario_material as material  # noqa: E402

Row = dict[str, Any]


def text_of(row: Row) -> str:
    return " ".join(message["content"] for message in row["prompt"])


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Row]]:
    folder = make_scenarios.FOLDER
    shipped = {split: folder / f"customer_service_{split}.jsonl" for split in make_scenarios.SIZES}
    return {
        split: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for split, path in shipped.items()
    }


def test_shipped_files_are_the_generators(splits: dict[str, list[Row]], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["make_scenarios.py", str(tmp_path)])
    make_scenarios.main()
    for split in splits:
        name = f"customer_service_{split}.jsonl"
        assert (tmp_path / name).read_bytes() == (make_scenarios.FOLDER / name).read_bytes()


def test_there_are_enough_and_a_third_of_the_held_out_are_of_unseen_kinds(splits: dict[str, list[Row]]) -> None:
    assert len(splits["train"]) >= 300
    assert len(splits["heldout"]) >= 100
    assert sum(row["extra_info"]["unseen_kind"] for row in splits["heldout"]) * 3 == len(splits["heldout"])
    assert len(material.TRAIN_KINDS) >= 10
    assert len({p for group in material.PRODUCTS.values() for p in group}) >= 40


def test_nothing_leaks_from_held_out_to_training(splits: dict[str, list[Row]]) -> None:
    train = splits["train"] + splits["handover"]
    unseen = {row["extra_info"]["kind"] for row in splits["heldout"] if row["extra_info"]["unseen_kind"]}
    assert unseen and not unseen & {row["extra_info"]["kind"] for row in train}
    assert not any(row["extra_info"]["unseen_kind"] for row in train)
    for take in (
        lambda row: row["prompt"][0]["content"],
        lambda row: row["prompt"][1]["content"],
        lambda row: row["reward_model"]["ground_truth"]["value"] * (row["extra_info"]["kind"] != "wrong_size"),
    ):
        assert not ({take(row) for row in train} & {take(row) for row in splits["heldout"]}) - {""}
    only_held_out = {product for group in material.UNSEEN_PRODUCTS.values() for product in group}
    assert not only_held_out & {row["extra_info"]["product"] for row in train}
    cases = {case for kind in material.UNSEEN_KINDS.values() for case in kind.case}
    assert not [row for row in train if any(case in row["prompt"][0]["content"] for case in cases)]


def test_no_scenario_comes_twice(splits: dict[str, list[Row]]) -> None:
    every = [row for rows in splits.values() for row in rows]
    assert len({row["extra_info"]["id"] for row in every}) == len(every)
    for part in (0, 1):
        assert len({row["prompt"][part]["content"] for row in every}) == len(every)


def test_rows_have_verls_shape_and_facts_the_grader_knows(splits: dict[str, list[Row]]) -> None:
    for split, rows in splits.items():
        for row in rows:
            assert row["data_source"] == "customer_service"
            roles = ["system", *["user", "assistant"] * 3][: len(row["prompt"])]
            assert [message["role"] for message in row["prompt"]] == roles
            assert len(row["prompt"]) == (6 if split == "handover" else 2)
            assert row["extra_info"]["split"] == split
            assert row["extra_info"].keys() == {"id", "split", "kind", "product", "unseen_kind"}
            Facts.of(row["reward_model"]["ground_truth"])


def test_the_prompt_names_the_one_remedy_and_the_detail_but_not_its_value(splits: dict[str, list[Row]]) -> None:
    for row in [row for rows in splits.values() for row in rows]:
        facts, system = row["reward_model"]["ground_truth"], plain(row["prompt"][0]["content"])
        assert [r for r, remedy in REMEDIES.items() if any(name.lower() in system for name in remedy.names)] == [
            facts["remedy"]
        ] or REMEDIES[facts["remedy"]].strong.search(system), system
        others = [r for r, remedy in REMEDIES.items() if r != facts["remedy"] and remedy.strong.search(system)]
        assert not others, (others, system)
        assert DETAILS[facts["detail"]].forms.search(system), system
        assert plain(facts["value"]) not in plain(" ".join(message["content"] for message in row["prompt"][:2]))


def test_a_handover_comes_after_apology_and_detail_and_leaves_the_offer(splits: dict[str, list[Row]]) -> None:
    for row in splits["handover"]:
        facts = Facts.of(row["reward_model"]["ground_truth"])
        so_far = follow(facts, [Message(**message) for message in row["prompt"]])
        assert so_far.apologised_at == 0 and so_far.given and not so_far.fault, row["prompt"]
        assert not any(turn.offers or turn.off_role for turn in so_far.turns) and not so_far.success


def test_prompts_are_short_and_without_gaps(splits: dict[str, list[Row]]) -> None:
    for row in [row for rows in splits.values() for row in rows]:
        system, complaint = (message["content"] for message in row["prompt"][:2])
        assert len(system.split()) <= 60
        assert len(complaint.split()) <= 32
        assert not re.search(r"[{}]|  |\bNone\b", text_of(row))


def test_policies_vary_within_a_kind_so_that_they_must_be_read(splits: dict[str, list[Row]]) -> None:
    by_kind = collections.defaultdict(set)
    for row in splits["train"]:
        by_kind[row["extra_info"]["kind"]].add(row["reward_model"]["ground_truth"]["remedy"])
    assert all(len(remedies) >= 3 for remedies in by_kind.values()), by_kind
    for split, rows in splits.items():
        common = collections.Counter(row["reward_model"]["ground_truth"]["remedy"] for row in rows).most_common(1)[0]
        assert common[1] <= 0.3 * len(rows), (split, common)
