"""Writes the customer-service scenarios that mdapo ships. Deterministic: the files are always the same.

python scripts/make_scenarios.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import scenario_material as material

from mdapo.environments.customer_service import REPLIES
from mdapo.rewards.dialogue_lexicon import DETAILS, REMEDIES

FOLDER = Path(__file__).parent.parent / "mdapo" / "environments" / "scenarios"
# "handover": scenarios for training that begin in the middle, where a colleague left off.
SIZES = {"train": 360, "heldout": 120, "handover": 180}
UNSEEN_SHARE = 3  # every third held-out scenario is of a kind that training never shows
ORDER_NUMBER_SHARE = 0.4  # at least; it is what shops ask for most
Row = dict[str, Any]


def scenarios() -> dict[str, list[Row]]:
    """Split name to rows in verl's shape; no two scenarios share a complaint, a policy or a customer's detail."""
    rng = random.Random(20)
    taken: set[str] = set()
    rows: dict[str, list[Row]] = {}
    for split, count in SIZES.items():
        rows[split] = []
        kinds = {"seen": list(material.TRAIN_KINDS), "unseen": list(material.UNSEEN_KINDS)}
        for index in range(count):
            unseen = split == "heldout" and index % UNSEEN_SHARE == UNSEEN_SHARE - 1
            names = kinds["unseen" if unseen else "seen"]
            turn = index // UNSEEN_SHARE if unseen else index
            row = _fresh(rng, taken, split, index, names[turn % len(names)])
            if split == "handover":
                row["prompt"] += _colleague(rng, row)
            rows[split].append(row)
    return rows


def _fresh(rng: random.Random, taken: set[str], split: str, index: int, kind: str) -> Row:
    while True:
        row = _scenario(rng, split, index, kind)
        marks = {row["prompt"][1]["content"], row["prompt"][0]["content"]}
        if row["reward_model"]["ground_truth"]["detail"] != "size":
            marks.add(row["reward_model"]["ground_truth"]["value"])
        if not marks & taken:
            taken |= marks
            return row


def _scenario(rng: random.Random, split: str, index: int, kind: str) -> Row:
    unseen = kind in material.UNSEEN_KINDS
    spec = (material.UNSEEN_KINDS if unseen else material.TRAIN_KINDS)[kind]
    group = rng.choice(spec.groups)
    new_product = split == "heldout" and rng.random() < 0.25
    product = rng.choice((material.UNSEEN_PRODUCTS if new_product else material.PRODUCTS)[group])
    detail = "order_number" if rng.random() < ORDER_NUMBER_SHARE else rng.choice(spec.details)
    remedy = rng.choice(spec.remedies)
    complaint = rng.choice(spec.complaints).format(p=product, days=rng.randint(3, 29))
    named = rng.choice(DETAILS[detail].names)
    ending = rng.choice(material.ENDINGS).format(detail=named)
    system = rng.choice(material.POLICIES).format(
        shop=rng.choice(material.SHOPS),
        case=rng.choice(spec.case),
        remedy=rng.choice(REMEDIES[remedy].names),
        detail=named,
    )
    return {
        "data_source": "customer_service",
        "prompt": [
            {"role": "system", "content": f"{system} {rng.choice(material.STYLES)}"},
            {"role": "user", "content": f"{complaint} {ending}"},
        ],
        "reward_model": {
            "style": "rule",
            "ground_truth": {
                "detail": detail,
                "value": _value(rng, detail),
                "remedy": remedy,
                "topic": [*product.lower().split(), *spec.topic],
            },
        },
        "extra_info": {
            "id": f"{split}-{index:03d}",
            "split": split,
            "kind": kind,
            "product": product,
            "unseen_kind": unseen,
        },
    }


def _colleague(rng: random.Random, row: Row) -> list[dict[str, str]]:
    """What was said before the policy takes over: an apology, and the detail, asked and given; no offer yet."""
    facts = row["reward_model"]["ground_truth"]
    words = {
        "p": row["extra_info"]["product"],
        "detail": DETAILS[facts["detail"]].names[0],
        "value": facts["value"],
        "right": REMEDIES[facts["remedy"]].names[0],
    }
    said = (
        ("assistant", material.APOLOGIES),
        ("user", REPLIES["soothed"]),
        ("assistant", material.REQUESTS),
        ("user", REPLIES["gives"]),
    )
    return [{"role": role, "content": rng.choice(lines).format(**words)} for role, lines in said]


def _value(rng: random.Random, detail: str) -> str:
    """What the customer answers when asked for the detail."""
    digits = rng.randint(10000, 99999)
    letters = "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=2))
    if detail == "email":
        return f"{rng.choice(material.FIRST_NAMES)}{digits % 1000}@mail.com"
    if detail == "phone":
        return f"555-{digits}"
    if detail == "address":
        return f"{digits % 190 + 1} {rng.choice(material.STREETS)}"
    if detail == "postcode":
        return str(digits)
    if detail == "purchase_date":
        return f"{digits % 28 + 1} {rng.choice(material.MONTHS)}"
    if detail == "photo":
        return f"photo-{digits}.jpg"
    if detail == "size":
        return rng.choice(material.SIZES)
    return f"{letters}-{digits}"


def render(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in scenarios().items():
        (folder / f"customer_service_{split}.jsonl").write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
