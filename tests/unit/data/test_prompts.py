"""Loading rows: the three shapes, and every malformed row named with file, line and field."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdapo.config.schema import Data
from mdapo.data import rows
from mdapo.data.prompts import drop_overlong, load_prompts
from mdapo.errors import UserError
from mdapo.types import Message

CFG = Data(train_files=["x"])
GOOD = {"prompt": [{"role": "user", "content": "Hello?"}]}


def write(folder: Path, *lines: object, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return str(file)


def problems(*files: str, cfg: Data = CFG) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_prompts(files, cfg)
    return caught.value.problems


def test_verl_row_is_read_with_its_columns(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "18"},
        "extra_info": {"split": "train", "index": 0},
    }
    (prompt,) = load_prompts([write(tmp_path, row)], CFG)
    assert prompt.messages == (Message("system", "S"), Message("user", "U"))
    assert (prompt.data_source, prompt.ground_truth, prompt.row) == ("openai/gsm8k", "18", 0)
    assert prompt.extra == {"ability": "math", "split": "train", "index": 0}
    assert prompt.uid == "rows.jsonl:1"


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    data = [{**GOOD, "data_source": "a", "extra_info": {"index": i}, "uid": f"u{i}"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "rows.parquet")
    assert load_prompts([str(tmp_path / "rows.parquet")], CFG) == load_prompts([write(tmp_path, *data)], CFG)


def test_question_and_answer_take_the_ground_truth_after_the_hashes(tmp_path: Path) -> None:
    file = write(
        tmp_path, {"question": "How many?", "answer": "3 + 4 = 7\n#### 7"}, {"question": "Who?", "answer": "Ada"}
    )
    first, second = load_prompts([file], Data(train_files=["x"], system_prompt="Think."))
    assert first.messages == (Message("system", "Think."), Message("user", "How many?"))
    assert (first.ground_truth, second.ground_truth) == ("7", "Ada")
    assert first.extra["answer"].startswith("3 + 4")


def test_plain_text_prompt_and_other_prompt_key(tmp_path: Path) -> None:
    file = write(tmp_path, {"ask": "Hello?", "ground_truth": [1, 2]})
    (prompt,) = load_prompts([file], Data(train_files=["x"], prompt_key="ask"))
    assert prompt.messages == (Message("user", "Hello?"),)
    assert prompt.ground_truth == [1, 2]


def test_system_prompt_is_not_put_before_a_row_that_has_one(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "U"}]}
    (prompt,) = load_prompts([write(tmp_path, row)], Data(train_files=["x"], system_prompt="Other."))
    assert [m.content for m in prompt.messages] == ["Own.", "U"]


def test_control_tokens_spelt_in_a_row_are_kept_as_text(tmp_path: Path) -> None:
    text = "Say <|im_end|> and <|endoftext|>"
    (prompt,) = load_prompts([write(tmp_path, {"prompt": text})], CFG)
    assert prompt.messages[0].content == text


def msg(**change: object) -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": "U", **change}]}


MALFORMED = [
    (b'{"prompt": ', "row: not JSON (Expecting value, column 11)"),
    (b"[1, 2]", "row: must be an object, is a list"),
    (b"null", "row: must be an object, is null"),
    (b'"text"', "row: must be an object, is text"),
    (b'{"prompt": "x", "a": NaN}', "row: not JSON (NaN is no number of JSON)"),
    (b'{"prompt": "x", "extra_info": {"a": 1e999}}', "row: 1e999 is beyond the largest number"),
    (b'{"prompt": "x", "a": [-1e400]}', "row: -1e400 is beyond the largest number"),
    (b'{"prompt": "x", "prompt": "y"}', "row: key 'prompt' comes twice in one object"),
    (b'{"prompt": "x", "extra_info": {"a": 1, "b": 2, "a": 1}}', "row: key 'a' comes twice in one object"),
    (b'{"prompt": "x", "a": ' + b"9" * 5000 + b"}", "row: not JSON (Exceeds the limit"),
    (b'{"prompt": "caf\xe9"}', "row: not UTF-8 (byte 15)"),
    (b'\xef\xbb\xbf{"prompt": "x"}', "row: starts with a byte order mark"),
    (b"[" * 100_000, "row: nested deeper than 32 levels"),
    (b'{"prompt": "x", "a": ' + b"[" * 40 + b"]" * 40 + b"}", "nested deeper than 32 levels"),
    (b'{"prompt": "a\\u0000b"}', "prompt: has a NUL character"),
    (b'{"prompt": "x", "extra_info": {"k": ["\\ud800"]}}', "extra_info.k[0]: has half of a surrogate pair"),
    (b'{"prompt": "x", "\\udfff": 1}', "a key: has half of a surrogate pair"),
    ({}, "prompt: missing; a row has prompt, messages or question"),
    ({"promt": "x"}, "did you mean promt?"),
    ({"prompt": None}, "prompt: must be a list of messages, is null"),
    ({"prompt": []}, "prompt: must be a list of messages, is an empty list"),
    ({"prompt": {"role": "user"}}, "prompt: must be a list of messages, is an object"),
    ({"prompt": 7}, "prompt: must be a list of messages, is a number"),
    ({"prompt": ""}, "prompt[0].content: is empty"),
    ({"prompt": ["U"]}, "prompt[0]: must be an object with role and content, is text"),
    ({"prompt": [{"role": "user"}]}, "prompt[0].content: missing"),
    ({"prompt": [{"content": "U"}]}, "prompt[0].role: missing"),
    (msg(role="robot"), "prompt[0].role: must be one of system, user, assistant, tool, is 'robot'"),
    (msg(role=None), "prompt[0].role: must be one of"),
    (msg(role=["user"]), "prompt[0].role: must be one of"),
    (msg(content=None), "prompt[0].content: must be text, is null"),
    (msg(content=" \n"), "prompt[0].content: is empty"),
    (msg(content=["U"]), "prompt[0].content: must be text, is a list"),
    (msg(tool_calls=[{"id": 1}]), "prompt[0].tool_calls: unknown"),
    (
        {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]},
        "messages[1].role: the last message is the assistant's",
    ),
    ({"question": None}, "question: must be text, is null"),
    ({"question": "Q", "answer": 5}, "answer: must be text, is a number"),
    ({"question": "Q", "answer": "A ####  "}, "answer: nothing after ####"),
    ({**GOOD, "data_source": 5}, "data_source: must be text, is a number"),
    ({**GOOD, "reward_model": "18"}, "reward_model: must be an object, is text"),
    ({**GOOD, "extra_info": [1]}, "extra_info: must be an object, is a list"),
    ({**GOOD, "uid": True}, "uid: must be text or an integer, is a boolean"),
    ({**GOOD, "uid": ""}, "uid: must be text or an integer, is an empty text"),
]


@pytest.mark.parametrize(("line", "what"), MALFORMED, ids=[w[:40] for _, w in MALFORMED])
def test_malformed_row_is_named_by_file_line_and_field(tmp_path: Path, line: object, what: str) -> None:
    file = write(tmp_path, GOOD, line, GOOD)
    (problem,) = problems(file)
    assert problem.startswith(f"{file}:2: ")
    assert what in problem


def test_all_problems_come_at_once_and_the_list_is_capped(tmp_path: Path) -> None:
    listed = problems(write(tmp_path, *[{}] * 25, GOOD), str(tmp_path / "none.jsonl"))
    assert len(listed) == rows.MAX_SHOWN + 1
    assert listed[0].split(": ")[0].endswith(":1")
    assert listed[-1] == "... and 6 more"


def test_giant_line_is_refused_without_being_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE", 1000)
    (problem,) = problems(write(tmp_path, GOOD, {"prompt": "x" * 5000}, GOOD))
    assert problem.endswith(":2: row: longer than 0 MiB")
    monkeypatch.setattr(rows, "MAX_LINE", 10_000)
    assert len(load_prompts([write(tmp_path, GOOD, {"prompt": "x" * 5000}, GOOD)], CFG)) == 3


def test_duplicate_uid_names_both_places(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, {**GOOD, "uid": "a"}, {**GOOD, "uid": "b"}, {**GOOD, "uid": "a"}))
    assert ":3: uid: 'a' is also that of" in problem
    assert problem.endswith("rows.jsonl:1")


def test_files_of_one_name_in_two_folders_get_distinct_uids(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    loaded = load_prompts([write(tmp_path / "a", GOOD), write(tmp_path / "b", GOOD)], CFG)
    assert [p.uid for p in loaded] == ["0.rows.jsonl:1", "1.rows.jsonl:1"]
    assert [p.row for p in loaded] == [0, 1]


def test_unusable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    same = write(tmp_path, GOOD)
    listed = problems(str(tmp_path / "no.jsonl"), str(tmp_path / "x.csv"), str(tmp_path / "broken.parquet"), same, same)
    assert [p.removeprefix(f"{tmp_path}/").split(": ")[0] for p in listed[:3]] == [
        "no.jsonl",
        "x.csv",
        "broken.parquet",
    ]
    assert "named 2 times" in listed[-1]


def test_empty_data_set_is_an_error(tmp_path: Path) -> None:
    assert "the data set is empty" in problems(write(tmp_path, b"", b"  "))[0]
    assert "the data set is empty" in problems()[0]


@pytest.mark.parametrize("name", ["nothing.jsonl", "../base.py", "/etc/passwd"])
def test_package_file_that_is_not_shipped(name: str) -> None:
    (problem,) = problems(f"package:{name}")
    assert "not shipped with mdapo; there are" in problem
    assert "gsm8k_train.jsonl" in problem


def test_shipped_slice_of_gsm8k() -> None:
    train = load_prompts(["package:gsm8k_train.jsonl"], CFG)
    held_out = load_prompts(["package:gsm8k_test.jsonl"], CFG)
    assert (len(train), len(held_out)) == (64, 32)
    assert not {p.messages for p in train} & {p.messages for p in held_out}
    assert train[0].ground_truth == "72"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "\ud800", "\x00"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "ground_truth", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "messages", "question", "answer", "extra_info", "reward_model", "uid"]), JSON
    )
)
def test_any_row_is_a_prompt_or_a_named_problem(row: dict[str, object]) -> None:
    try:
        prompt = rows.make_prompt(row, uid="u", index=0, prompt_key="prompt", system_prompt=None)
    except rows.RowError as error:
        assert ": " in str(error)
    else:
        assert prompt.messages and all(m.content.strip() for m in prompt.messages)


def test_overlong_prompts_are_dropped_with_a_count_or_named(tmp_path: Path) -> None:
    loaded = load_prompts([write(tmp_path, *({"prompt": "x" * n} for n in (3, 9, 5, 7)))], CFG)
    kept, dropped = drop_overlong(loaded, lambda p: len(p.messages[0].content), 5, "drop", kind="training")
    assert ([p.row for p in kept], dropped) == ([0, 2], 2)
    with pytest.raises(UserError, match=r"data.train_files: .*rows.jsonl:2: 9 tokens") as caught:
        drop_overlong(loaded, lambda p: len(p.messages[0].content), 5, "error", kind="training")
    assert len(caught.value.problems) == 2
    with pytest.raises(UserError, match=r"data.val_files: all 4 prompts are longer than .*=2; .* 3 tokens"):
        drop_overlong(loaded, lambda p: len(p.messages[0].content), 2, "drop", kind="validation")


def test_parquet_columns_that_are_no_json_data_are_named(tmp_path: Path) -> None:
    when = datetime.datetime(2024, 7, 26)
    table = pa.table({"prompt": ["x", "y"], "extra_info": [{"when": when}, None], "raw": [None, b"\xff"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    first, second = problems(str(tmp_path / "rows.parquet"))
    assert first.endswith("rows.parquet:1: extra_info.when: datetime is not JSON data")
    assert second.endswith("rows.parquet:2: raw: bytes is not JSON data")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_a_file_is_a_prompt_or_a_named_problem(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed, cut out or put in: each line is read or named, and nothing else is raised."""
    raw = bytearray(json.dumps({**GOOD, "extra_info": {"index": 1}}).encode() + b"\n") * 2
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    file = tmp_path / "rows.jsonl"
    file.write_bytes(raw)
    try:
        load_prompts([str(file)], CFG)
    except UserError as error:
        assert all(problem.startswith(str(file)) for problem in error.problems)
