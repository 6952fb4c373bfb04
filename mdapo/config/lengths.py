"""What ``rollout.adaptive_lengths`` makes of the lengths that are configured, which are its base: plain arithmetic.

Three lengths follow one scale, which the dialogues' turns choose (mdapo/algorithms/lengths.py): ``rollout.
max_response_len`` and ``rollout.max_turn_len`` of conversations that begin, and ``actor.ppo_max_token_len``. The first
two end at ``model.max_context``, which engines and model are built for; the last at what memory allows.
"""

from __future__ import annotations

from mdapo.config.schema import Config


def scaled(base: int, scale: float) -> int:
    """The nearest whole number, at least 1."""
    return max(round(base * scale), 1)


def largest_scale(config: Config) -> float:
    adaptive = config.rollout.adaptive_lengths
    return adaptive.longer if adaptive.enable else 1.0


def longest_sequence(config: Config) -> int:
    """Tokens of the longest sample there can be."""
    response = scaled(config.rollout.max_response_len, largest_scale(config))
    return min(config.data.max_prompt_len + response, config.model.max_context)


def token_len(config: Config, scale: float, *, memory_cap: int | None = None) -> int:
    """Tokens of a micro-batch at this scale. It grows up to ``rollout.adaptive_lengths.max_token_len``, or, where that
    is null, to ``memory_cap``; what is configured is never cut by them."""
    base, most = config.actor.ppo_max_token_len, config.rollout.adaptive_lengths.max_token_len or memory_cap
    wanted = scaled(base, scale)
    return wanted if most is None else min(wanted, max(base, most))


def step_token_len(config: Config, scale: float, *, longest: int, multiple: int, memory_cap: int | None = None) -> int:
    """The cap of a step's micro-batches: that of the scale, and room for its ``longest`` sample, which may have begun
    at another scale, rounded up to ``multiple``."""
    largest = token_len(config, largest_scale(config), memory_cap=memory_cap)
    room = min(-(-longest // multiple) * multiple, largest)
    return max(token_len(config, scale, memory_cap=memory_cap), room)
