"""What each ``algorithm.name`` stands for: one row a paper, filled in wherever the configuration says nothing.

| name        | advantage    | policy loss | aggregation             | clip low, high | source                       |
|-------------|--------------|-------------|-------------------------|----------------|------------------------------|
| dapo        | group_norm   | token_clip  | token-mean              | 0.2, 0.28      | arXiv 2503.14476, eq. 8-13   |
| grpo        | group_norm   | token_clip  | seq-mean-token-mean     | 0.2, 0.2       | arXiv 2402.03300, eq. 3      |
| dr_grpo     | group_mean   | token_clip  | seq-mean-token-sum-norm | 0.2, 0.2       | arXiv 2503.20783, sect. 3    |
| gspo        | group_norm   | gspo        | seq-mean-token-mean     | 3e-4, 4e-4     | arXiv 2507.18071, eq. 5-7    |
| gmpo        | group_norm   | gmpo        | seq-mean-token-mean     | 0.4, 0.4 (log) | arXiv 2507.20673, sect. 4    |
| rloo        | rloo         | token_clip  | token-mean              | 0.2, 0.2       | arXiv 2402.14740, sect. 3    |
| reinforce++ | reinforce++  | token_clip  | token-mean              | 0.2, 0.2       | arXiv 2501.03262, sect. 3    |

GMPO clips the log-ratio, the others the ratio. RLOO as published has no clip: with one update a step the ratio is 1 and
the clip does nothing. REINFORCE++ normalises over the global batch. A KL term is ``algorithm.kl.enable`` for all of
them: the papers of GRPO and REINFORCE++ have one, DAPO, Dr. GRPO and GSPO
train without. DAPO's soft overlong penalty (eq. 13) is ``reward.overlong_buffer_cfg``, its dynamic sampling (eq. 11)
``algorithm.filter_groups``.
"""

from __future__ import annotations

from typing import Any

from mdapo.config.schema import Algorithm

_COLUMNS = ("advantage_estimator", "policy_loss", "loss_agg_mode", "clip_ratio_low", "clip_ratio_high")
PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip(_COLUMNS, row, strict=True))
    for name, row in {
        "dapo": ("group_norm", "token_clip", "token-mean", 0.2, 0.28),
        "grpo": ("group_norm", "token_clip", "seq-mean-token-mean", 0.2, 0.2),
        "dr_grpo": ("group_mean", "token_clip", "seq-mean-token-sum-norm", 0.2, 0.2),
        "gspo": ("group_norm", "gspo", "seq-mean-token-mean", 3e-4, 4e-4),
        "gmpo": ("group_norm", "gmpo", "seq-mean-token-mean", 0.4, 0.4),
        "rloo": ("rloo", "token_clip", "token-mean", 0.2, 0.2),
        "reinforce++": ("reinforce++", "token_clip", "token-mean", 0.2, 0.2),
    }.items()
}


def resolve_algorithm(algorithm: Algorithm) -> Algorithm:
    """The same with every None filled from its row (but ``clip_ratio_c``: None is no dual clip). What is set stays."""
    preset = PRESETS[algorithm.name]
    return algorithm.model_copy(update={k: v for k, v in preset.items() if getattr(algorithm, k) is None})
