"""The soft penalty on long answers (DAPO, arXiv 2503.14476, eq. 13)."""

from __future__ import annotations


def overlong_penalty(model_tokens: int, *, max_response_len: int, buffer_len: int, factor: float = 1.0) -> float:
    """A number in [-factor, 0] to add to an episode's reward.

    0 up to ``max_response_len - buffer_len`` tokens, then linearly down to ``-factor`` at ``max_response_len``, and
    never below. ``model_tokens`` are those the policy wrote: what a tool or a user says costs nothing.
    """
    room = max_response_len - buffer_len - model_tokens
    return max(min(factor * room / buffer_len, 0.0), -factor)
