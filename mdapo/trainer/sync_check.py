"""``sync.check`` in a run: after a sync, the actor scores what each server writes with the new weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mdapo.errors import UserError
from mdapo.rollout.engine import Engine
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.sync.compare import Asked, Probed, allowed_gap, largest_gap
from mdapo.types import NO_SAMPLES

if TYPE_CHECKING:
    from mdapo.trainer.flow import Trainer

GAP = "sync/logprob_gap"


def check_sync(t: Trainer) -> dict[str, float]:
    """``GAP``, the largest difference between a server's log-prob and the actor's, on every rank; collective.

    A server that gives no answer is told and left out; nothing is measured where none does. ``UserError`` on every
    rank, which names the servers, when the gap is more than rounding explains.
    """
    version = t.state.version
    probed = t.share_errors(lambda: t.lead.probe(version=version))
    if probed is not None:
        for url, why in probed.failed.items():
            t.say(f"sync.check: {url} could not be asked: {why}")
    urls = t.agree({"urls": list(probed.by_url) if probed is not None else []})["urls"]
    if not urls:
        return {}
    gap, allowed = _gap(t, probed, urls), allowed_gap(t.config)
    if gap <= allowed:
        if t.first_check:
            servers = f"{len(urls)} servers" if len(urls) > 1 else urls[0]
            t.say(f"sync.check: {servers}: log-probs within {gap:.2g} of the actor's (at most {allowed:g})")
            t.first_check = False
        return {GAP: gap}
    gaps = {url: _gap(t, probed, [url]) for url in urls}
    wrong = [f"  {url}: {found:.3g}" for url, found in gaps.items() if found > allowed]
    raise UserError(
        [
            f"sync.check: after the sync to version {version} log-probs are more than {allowed:g} off the actor's:",
            *wrong,
            "  such a server has other weights, or computes otherwise: look at its dtype, quantization and attention "
            "(rollout.engine_args); sync.check=false trains with it as it is",
        ]
    )


def _gap(t: Trainer, probed: Probed | None, urls: list[str]) -> float:
    mini_batches = t.scatter(probed.of(urls) if probed is not None else NO_SAMPLES)
    return largest_gap(t.actor, [batch for mini in mini_batches for batch in mini])


def askable(engine: Engine) -> list[Asked]:
    """Each place that writes tokens by itself."""
    if isinstance(engine, SGLangEngine):
        return [Asked(client.url, partial(engine.ask, client)) for client in engine.clients]
    return [Asked("the local engine", engine.generate)]
