"""Whether a server is one that a run can use: asked before the first step, so that nothing is trained on another one.

A server takes weights by name. What it does not know it leaves out without a word, and what it was not sent it keeps: a
model with one layer more would answer, and be another one.
"""

from __future__ import annotations

from pathlib import Path

from mdapo.config.model_facts import ModelFacts, read_model
from mdapo.rollout.engine import EngineError
from mdapo.rollout.sglang_client import Client, ServerInfo
from mdapo.rollout.sglang_options import CONTEXT_MARGIN
from mdapo.rollout.sglang_replies import Refused

# Of ModelFacts, by the names of config.json: what makes two models compute differently with the same weights, or have
# others.
SAME = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "eps": "rms_norm_eps",
}


async def ask(
    client: Client,
    *,
    max_context: int,
    model: ModelFacts | None,
    probe_s: float,
    turn_s: float,
) -> tuple[ServerInfo | None, list[str]]:
    """What the server says of itself, and all that is wrong with it; None and why where it does not answer.

    A question after what it is has ``probe_s`` seconds, one for a token ``turn_s``.
    """
    try:
        info = await client.info(deadline_s=probe_s)
        # a run that was killed while it brought weights left the server paused
        await client.post("/continue_generation", {}, deadline_s=probe_s)
        await client.check_logprobs(deadline_s=turn_s)
        problems = await _vocabulary(client, deadline_s=turn_s)
    except EngineError as error:
        return None, [str(error)]
    if info.max_context < max_context:
        problems.append(
            f"{client.url}: takes {info.max_context} tokens, model.max_context is {max_context}; start it with "
            f"--context-length {max_context + CONTEXT_MARGIN} and no smaller --max-total-tokens"
        )
    if model is not None and model.architecture not in info.architectures:
        problems.append(f"{client.url}: serves {', '.join(info.architectures)}, model.path is {model.architecture}")
    elif model is not None:
        problems += _configuration(client.url, Path(info.started_from), model)
    return info, problems


async def _vocabulary(client: Client, *, deadline_s: float) -> list[str]:
    """The last id of the vocabulary must be one for the server, whose first update tells of a larger one. It is not
    asked as a prompt, which SGLang 0.5.19 does not look at: an id that it does not have ends it."""
    last = client.vocab_size - 1
    sampling = {"max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "token_ids_logprob": [last]}
    try:
        await client.post("/generate", body, deadline_s=deadline_s)
    except Refused as error:
        return [f"{error}; model.path has a vocabulary of {client.vocab_size} ids: it serves another model"]
    return []


def _configuration(url: str, folder: Path, model: ModelFacts) -> list[str]:
    """Where the folder that the server was started with can be seen from here, its config.json says the same."""
    if not folder.is_absolute() or not (folder / "config.json").is_file():
        return []
    found, _ = read_model(folder)
    if found is None:
        return []  # the server made something of it; what we cannot read tells nothing
    other = [
        f"{key} {getattr(found, name)} instead of {getattr(model, name)}"
        for name, key in SAME.items()
        if getattr(found, name) != getattr(model, name)
    ]
    return [f"{url}: the model in {folder} is not model.path's: {', '.join(other)}"] if other else []
