"""Which dynamic batch a configuration asks for."""

from __future__ import annotations

from mdapo.config.schema import Config
from mdapo.rollout.ahead import AheadBatch
from mdapo.rollout.dynamic_batch import DynamicBatch
from mdapo.rollout.stages import Stages
from mdapo.rollout.streaming import InOrderBatch, StreamingBatch


def batch_of(config: Config) -> type[DynamicBatch]:
    """By ``rollout.mode`` and by whether the stage *sample* streams. ``UserError`` when a stage cannot be loaded."""
    if config.rollout.mode == "async":
        return AheadBatch
    if not Stages.of(config).sampler.streams:
        return DynamicBatch
    return InOrderBatch if config.rollout.mode == "sync" else StreamingBatch
