"""How like each other texts are in the eyes of one embedder: what makes similarities of different embedders comparable.

Cosines mean nothing by themselves: unrelated texts are at 0.05 with one model and at 0.75 with another. So every
embedder is first asked about the same few pairs, a message and a good reply to it. Where unrelated texts stand is 0,
where most good replies stand, or above, is 1, and what lies between is linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mdapo.rewards.embeddings import Cached, EmbeddingError

LEAST_GAP = 0.02  # between the two marks, below which an embedder tells nothing apart
RELATED = 0.3  # quantile of the related pairs' cosines that is the mark of 1
# Of none of the dialogues that the measures are validated on.
PAIRS: tuple[tuple[str, str], ...] = (
    ("How do I boil an egg so that the yolk stays soft?", "Boil the egg for six minutes, then put it into cold water."),
    ("My train was cancelled. Do I get my money back?", "Yes, for a cancelled train you can claim the full fare back."),
    ("Which paint is best for a garden fence?", "For a garden fence use a weatherproof wood stain rather than paint."),
    ("The app crashes whenever I open the camera.", "Please update the app, and allow it to use the camera again."),
    (
        "What does a beginner need for watercolour painting?",
        "A small set of watercolours, two round brushes and paper.",
    ),
    ("I would like to cancel my gym membership.", "I can cancel your membership. What is your member number?"),
    ("Who wrote the play about the Danish prince?", "Shakespeare wrote Hamlet, the play about the prince of Denmark."),
    ("My daughter is afraid of the dark at night.", "A small night light in her room helps many children."),
    ("Can I freeze cooked rice?", "Yes, let the rice cool quickly and freeze it in flat bags."),
    ("The shoes I ordered are too tight.", "I am sorry that the shoes are too tight. Shall we send a larger size?"),
    ("How far is the moon from the earth?", "The moon is about 384,000 kilometres away from the earth."),
    (
        "I need a present for a colleague who likes tea.",
        "A tin of fine loose tea and a small strainer would please her.",
    ),
    ("My invoice shows a charge I do not know.", "Let me look at the charge. Please tell me the invoice number."),
    ("How do I tie a bow tie?", "Cross the long end over the short one, then pull it through the loop at the neck."),
    ("Is it safe to swim after heavy rain?", "Wait a day: after heavy rain rivers carry dirt and strong currents."),
    ("Thanks, that was very helpful!", "You are welcome! Is there anything else I can help you with?"),
)


@dataclass(frozen=True)
class Scale:
    """Cosines of unrelated and of related texts."""

    unrelated: float
    related: float

    def __call__(self, cosines: np.ndarray) -> np.ndarray:
        """Any shape, to [0, 1]."""
        return np.clip((cosines - self.unrelated) / self.gap, 0.0, 1.0)

    @property
    def gap(self) -> float:
        return self.related - self.unrelated


def calibrate(embedder: Cached) -> Scale:
    """Raises ``EmbeddingError`` when the embedder fails, or does not tell related texts from others."""
    messages, replies = (embedder.embed(texts) for texts in zip(*PAIRS, strict=True))
    cosines = messages.astype(np.float64) @ replies.T.astype(np.float64)
    other = ~np.eye(len(PAIRS), dtype=bool)
    scale = Scale(float(cosines[other].mean()), float(np.quantile(cosines.diagonal(), RELATED)))
    if not scale.gap >= LEAST_GAP:
        raise EmbeddingError(
            f"replies are no more like their message ({scale.related:.3f}) than like others ({scale.unrelated:.3f})"
        )
    return scale
