"""The SGLang engine that a configuration asks for, checked before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mdapo.config.model_facts import ModelFacts
from mdapo.config.schema import Config
from mdapo.errors import UserError
from mdapo.rollout.sglang_client import open_session
from mdapo.rollout.sglang_engine import SGLangEngine
from mdapo.rollout.sglang_servers import Address, Restart, Resync, Sync
from mdapo.rollout.sglang_timing import Timing


async def connect(
    config: Config,
    model: ModelFacts,
    addresses: Sequence[Address],
    *,
    router: Address | None = None,
    sync: Sync,
    resync: Resync | None = None,
    restart: Restart | None = None,
    notify: Callable[[str], object],
) -> SGLangEngine:
    """An engine over servers that answer already; see ``SGLangEngine`` and, for those of others, ``external``. It
    serves after its first ``update_weights``. ``UserError``: a server that is not as the run needs it."""
    session = open_session()
    try:
        engine = SGLangEngine(
            addresses,
            session=session,
            vocab_size=model.vocab,
            sync=sync,
            resync=resync,
            restart=restart,
            router=router,
            max_running=config.rollout.max_running,
            timing=Timing.of(config),
            notify=notify,
        )
    except UserError:  # a key or an URL that cannot be one
        await session.close()
        raise
    try:
        await engine.check(max_context=config.model.max_context, model=model)
    except BaseException:
        await engine.close()
        raise
    return engine
