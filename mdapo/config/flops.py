"""What training on a sequence costs, from the shape of the actual model: the weights by which batches are balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mdapo.config.model_facts import ModelFacts, require_facts
from mdapo.config.schema import Config

# Passes over a matrix product, in units of its forward pass: forward 1, backward 2 (towards the input, the weight).
LINEAR = 3.0
# Causal attention that keeps no matrix of scores: two products forward, five backward, which computes the scores again
# (FlashAttention-2, arXiv 2307.08691, section 4.1).
ATTENTION = 3.5
# Log-probs straight from hidden states: logits again in backward (mdapo/ops/token_logprob.py).
VOCABULARY = 4.0


@dataclass(frozen=True)
class WorkModel:
    """FLOPs of forward and backward over a sequence of L tokens, R of them scored: a L + b L^2 + c R.

    Norms, rotations and activations are left out: they grow as L does, and cost a few per cent of it.
    """

    per_token: float
    per_token2: float
    per_scored: float

    def of(self, tokens: Any, scored: Any, squares: Any = None) -> Any:
        """Numbers or arrays, element by element. ``squares``: of a prefix tree, in place of L^2, the sum over its nodes
        of end^2 - begin^2 (`mdapo.ops.prefix`)."""
        pairs2 = 1.0 * tokens * tokens if squares is None else squares
        return self.per_token * tokens + self.per_token2 * pairs2 + self.per_scored * scored


TOKENS_ONLY = WorkModel(1.0, 0.0, 0.0)


def work_model(model: ModelFacts, *, recompute: str = "none") -> WorkModel:
    """The coefficients of a model. Tensor, pipeline and context parallelism divide all of them alike.

    ``recompute`` (actor.recompute) adds a forward pass of the layers, or of their attention alone.
    """
    again = float(recompute == "full")
    again_attention = float(recompute in ("full", "selective"))
    return _passes(model, linear=LINEAR + again, attention=ATTENTION + again_attention, vocabulary=VOCABULARY)


def model_flops(model: ModelFacts) -> WorkModel:
    """The same without what is computed a second time: what model FLOP utilisation counts (PaLM, arXiv 2204.02311,
    appendix B), with causal attention as half of all pairs, and the vocabulary for scored tokens only."""
    return _passes(model, linear=LINEAR, attention=LINEAR, vocabulary=LINEAR)


def _passes(model: ModelFacts, *, linear: float, attention: float, vocabulary: float) -> WorkModel:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    products = model.layers * model.hidden * (2 * q + 2 * kv)  # multiply-adds: q, k, v, output
    experts = model.experts
    dense_layers = model.layers - (experts.layers if experts else 0)
    feed_forward = dense_layers * 3 * model.hidden * model.ffn
    if experts:
        columns = experts.active * experts.ffn + experts.shared_ffn
        feed_forward += experts.layers * model.hidden * (3 * columns + experts.count)  # and the router
    scores = model.layers * q  # per pair of tokens: two products over half the pairs
    return WorkModel(
        per_token=2 * linear * (products + feed_forward),
        per_token2=2 * attention * scores,
        per_scored=2 * vocabulary * model.hidden * model.vocab,
    )


def read_work_model(config: Config) -> WorkModel:
    """That of the configured model. ``UserError`` when it is none that can be run."""
    return work_model(require_facts(config.model.path), recompute=config.actor.recompute)
