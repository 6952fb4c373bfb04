"""The Python API of a run: all parts, built from one configuration, and what a step needs of them.

    with Trainer(load("configs/quickstart.yaml")) as trainer:
        trainer.resume()
        record = step(trainer)

Every rank has layout, actor and state. Rank 0 alone has the rollout, its event loop, and the journal (the run folder).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from mdapo.algorithms.losses import make_loss_fn
from mdapo.config.flops import TOKENS_ONLY, read_work_model
from mdapo.config.lengths import step_token_len
from mdapo.config.plan import balance_objective
from mdapo.data.batching import make_samples, micro_batches, plan_shares
from mdapo.data.wire import dump_share, load_share
from mdapo.errors import NonFiniteError, NothingLearnableError, StorageError, UserError
from mdapo.megatron import layout as ranks
from mdapo.megatron.actor import Actor
from mdapo.megatron.health import weights_are_finite
from mdapo.rollout.engine import EngineError
from mdapo.rollout.event_loop import EventLoop
from mdapo.sync.weights import sync_weights
from mdapo.tracking.metrics import Timers
from mdapo.trainer import state as state_io
from mdapo.trainer.journal import EvalJournal, Journal
from mdapo.trainer.report import memory_cap
from mdapo.trainer.rollout import Rollout, build_rollout
from mdapo.trainer.signals import RESUMES, Interrupted, StopSignal
from mdapo.trainer.sync_check import check_sync

if TYPE_CHECKING:
    from mdapo.config.load import Loaded
    from mdapo.megatron.actor import UpdateStats
    from mdapo.rollout.dynamic_batch import Collected
    from mdapo.rollout.engine import Engine
    from mdapo.sync.push import Pusher
    from mdapo.trainer.record import StepRecord
    from mdapo.types import MicroBatch, Samples

# What rank 0 may meet while it collects or evaluates, and every rank must raise with it.
SHARED_ERRORS: tuple[type[Exception], ...] = (Interrupted, NothingLearnableError, StorageError, UserError)
MAX_SKIPPED_IN_A_ROW = 3
T = TypeVar("T")


class Trainer:
    """All parts of a run on this rank. Raises ``UserError`` for a configuration, model or data that cannot be used.

    ``only_evaluate``: no optimizer, and the run's folder is read, not taken. ``trains`` is False there and with
    ``debug.mode: rollout``.
    """

    def __init__(self, loaded: Loaded, *, only_evaluate: bool = False) -> None:
        self.config, self.only_evaluate = loaded.config, only_evaluate
        self.trains = not only_evaluate and loaded.config.debug.mode != "rollout"
        self.started = time.monotonic()
        self.first_step = True
        self.first_check = True
        self.lost: Interrupted | UserError | None = None  # why no more tokens can be had
        self.synced: dict[str, float] = {}  # ``sync/...`` of the newest sync
        self.stop = StopSignal()
        self.stop.install()
        self.timers = Timers()
        self.state = state_io.TrainState()
        self.committed: state_io.Moment | None = None  # where the newest commit point stands
        self.layout = ranks.init_distributed(self.config, timeout_s=self.config.run.init_timeout_s)
        self.is_lead = self.layout.rank == 0
        self.patient = ranks.patient_group()
        self.loop = EventLoop(background=self.config.rollout.mode == "async") if self.is_lead else None
        self.journal: Journal | None = None
        self.rollout: Rollout | None = None
        self.work = TOKENS_ONLY
        self.token_cap: int | None = None  # of adaptive lengths (rank 0)
        try:
            self.share_errors(lambda: self._build_lead(loaded))
            self.loss_fn = make_loss_fn(self.config)
            self.actor = Actor(self.config, self.layout, trainable=self.trains)
            self.actor.load_hf(self.config.model.path)
            self.reference = self._build_reference() if self.trains and self.config.algorithm.kl.enable else None
            self.share_errors(self._claim_folder)  # not before: a start that fails leaves an earlier run in its place
        except BaseException:
            self.close()
            raise

    def _build_lead(self, loaded: Loaded) -> None:
        if self.loop is not None:
            self.work = read_work_model(self.config)
            self.token_cap = memory_cap(loaded, world=self.layout.world)
            self.journal = EvalJournal(loaded) if self.only_evaluate else Journal(loaded)
            self.rollout = build_rollout(self.config, loop=self.loop, journal=self.journal, stop=self.stop)

    def _claim_folder(self) -> None:
        assert self.journal is not None
        self.journal.claim()

    def _build_reference(self) -> Actor:
        path = self.config.model.ref_path or self.config.model.path
        reference = Actor(self.config, self.layout, model_path=path, trainable=False)
        reference.load_hf(path)
        return reference

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and the reward processes, leave the run folder and the process group."""
        if self.rollout is not None:
            self.rollout.close()
        if self.journal is not None:
            self.journal.close()
        if self.loop is not None:
            self.loop.close()
        ranks.destroy()

    @property
    def lead(self) -> Rollout:
        """Rank 0's rollout."""
        assert self.rollout is not None, "only rank 0 has a rollout"
        return self.rollout

    @property
    def engine(self) -> Engine | None:
        return self.rollout.engine if self.rollout is not None else None

    @property
    def at_end(self) -> bool:
        """All steps are made, or no prompts are left."""
        return self.state.step >= self.config.run.total_steps or self.state.exhausted

    @property
    def seconds(self) -> float:
        """Of this run, earlier processes included."""
        return self.state.seconds + time.monotonic() - self.started

    # ---- what all ranks do together ------------------------------------------------------------------------------

    def agree(self, values: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's small JSON object, on every rank."""
        payload = json.dumps(values).encode() if self.is_lead else None
        return json.loads(ranks.broadcast_bytes(payload, group=self.patient))

    def share_errors(self, work: Callable[[], T]) -> T | None:
        """Do ``work`` on rank 0; what people can mend or asked for is raised on every rank: none waits."""
        result, found = None, {}
        if self.is_lead:
            try:
                result = work()
            except SHARED_ERRORS as error:
                found = {"kind": type(error).__name__, "message": str(error)}
        found = self.agree(found)
        for kind in SHARED_ERRORS:
            if found.get("kind") == kind.__name__:
                raise kind(found["message"])
        return result

    def collect(self) -> Collected | None:
        """The step's groups on rank 0, None elsewhere."""
        return self.share_errors(lambda: self.lead.collect(version=self.state.version, stop=self.stop))

    def credited(self, collected: Collected) -> tuple[Samples, dict[str, float]]:
        """The step's samples with their advantages, and numbers to log (rank 0)."""
        return make_samples(collected.groups, self.config, overlong_len=self.lead.lengths.overlong_len)

    def token_len(self, samples: Samples) -> int:
        """The cap of the step's micro-batches, in tokens (rank 0)."""
        if not self.config.rollout.adaptive_lengths.enable:
            return self.config.actor.ppo_max_token_len
        return step_token_len(
            self.config,
            self.lead.lengths.scale,
            longest=int(samples.lengths_N.max(initial=0)),
            multiple=self.layout.token_multiple,
            memory_cap=self.token_cap,
        )

    def scatter(self, samples: Samples) -> list[list[MicroBatch]]:
        """This rank's mini-batches, each a list of packed micro-batches; a rank gets only its own share."""
        multiple = self.layout.token_multiple

        def plan() -> list[bytes]:
            layout = self.layout
            planned = plan_shares(
                samples,
                self.config,
                dp=layout.dp,
                work=self.work,
                token_multiple=multiple,
                micro_multiple=layout.micro_multiple,
                at_least=layout.pp,
                max_token_len=self.token_len(samples),
                objective=balance_objective(self.config),
            )
            return [dump_share(share) for share in planned]

        own = load_share(ranks.scatter_shares(self.share_errors(plan)))
        return micro_batches(own, self.config, token_multiple=multiple)

    def make_room(self) -> None:
        """Training begins: servers on the actor's devices give their memory back, until the sync that follows it; what
        the actor had offloaded comes in."""
        self.share_errors(lambda: self.lead.make_room())
        self.actor.take_device()

    def with_logps(self, mini_batches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Add the log-probs before the update, and with a KL term the reference model's.

        Of the first update its own forward pass gives them: only what is trained on later needs a pass before.
        """
        own = 1 if self.config.actor.ppo_epochs == 1 else 0
        if len(mini_batches) * self.config.actor.ppo_epochs > 1:
            with self.timers("old_logps"):
                later = [scored(self.actor, mini, "old") for mini in mini_batches[own:]]
            mini_batches = [*mini_batches[:own], *later]
        if self.reference is not None:
            with self.timers("ref_logps"):
                mini_batches = [scored(self.reference, mini, "ref") for mini in mini_batches]
        return mini_batches

    def sync(self) -> None:
        """Bring the engine the actor's weights, as ``state.version``. No token is written meanwhile.

        An engine that cannot take them, or that ``sync.check`` finds to have others, ends the run at the next
        ``raise_if_stopped``, when what is under way is whole.
        """
        if not self.agree({"engine": self.engine is not None})["engine"]:
            return
        self.share_errors(lambda: self.lead.pause())
        self.actor.leave_device()
        ranks.wait_for_all(self.patient)  # servers on any rank's device take their memory again
        pusher = self.lead.pusher if self.is_lead else None
        try:
            sync_weights(
                self.actor,
                self.engine,
                version=self.state.version,
                loop=self.loop,
                pusher=pusher,
                group=self.patient,
            )
            self.synced = sync_metrics(pusher)
            if self.config.sync.check:
                self.synced |= check_sync(self)
        except EngineError as error:
            self.lost = Interrupted(f"the engine has no weights to go on with: {error}; the same command resumes")
            return
        except UserError as error:
            self.lost = error
            return
        self.share_errors(lambda: self.lead.resume())

    def evaluate(self) -> dict[str, float]:
        """``eval/...`` on the validation prompts, on every rank; empty where there are none."""
        with self.timers("eval"):
            found = self.share_errors(lambda: self.lead.evaluate(step=self.state.step, stop=self.stop))
            return self.agree(found or {})

    def raise_if_lost(self) -> None:
        """Raises on every rank: ``Interrupted`` when the engine is lost, ``UserError`` when it has other weights."""
        if self.lost is not None:
            raise self.lost

    def raise_if_stopped(self) -> None:
        """As ``raise_if_lost``, and ``Interrupted`` on every rank when rank 0 was asked to stop."""
        self.raise_if_lost()
        if self.agree({"stop": self.stop.requested})["stop"]:
            raise Interrupted(RESUMES)

    def check_finite(self, updates: Sequence[UpdateStats], collected: Collected | None) -> None:
        """Count a skipped step, naming its prompts; the same on every rank.

        Raises ``NonFiniteError`` after three of them in a row, and when an update left a weight that is not finite (its
        loss and gradient were): neither is ever saved or brought to the engine.
        """
        skipped = sum(update.skipped for update in updates)
        if skipped and collected is not None:
            prompts = ", ".join(group.prompt.uid for group in collected.groups)
            self.say(
                f"step {self.state.step + 1}: {skipped} of {len(updates)} updates left out, their loss or gradient was "
                f"not finite; prompts: {prompts}"
            )
        if updates:
            self.state.skipped_in_a_row = self.state.skipped_in_a_row + 1 if skipped else 0
        if self.state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a loss or gradient that is not finite; nothing of them was "
                "saved"
            )
        if len(updates) > skipped and not weights_are_finite(self.actor):
            raise NonFiniteError(
                f"step {self.state.step + 1}: an update made weights that are not finite; the last checkpoint is from "
                "before it"
            )

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint, if there is one."""
        return state_io.resume(self)

    def save(self) -> None:
        """Write one commit point, unless the newest one is of this very moment."""
        with self.timers("save"):
            state_io.save(self)

    def keep(self, record: StepRecord) -> None:
        """Write down what a step was trained on (rank 0)."""
        if self.journal is not None:
            self.journal.keep(record)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Write down a finished step's numbers (rank 0)."""
        if self.journal is not None:
            self.journal.note(self.state.step, metrics)

    def say(self, text: str) -> None:
        if self.journal is not None:
            self.journal.say(text)


def sync_metrics(pusher: Pusher | None) -> dict[str, float]:
    """``sync/...`` of its newest sync."""
    if pusher is None or pusher.last is None:
        return {}
    last = pusher.last
    return {"sync/bytes": last.bytes_sent, "sync/servers": len(last.synced), "sync/failed": len(last.failed)}


def scored(actor: Actor, mini: list[MicroBatch], kind: Literal["old", "ref"]) -> list[MicroBatch]:
    """The micro-batches with the log-probs of ``actor`` as their old or reference log-probs."""
    pairs = zip(mini, actor.logprobs(mini), strict=True)
    if kind == "old":
        return [replace(batch, old_logps_R=logps_R) for batch, logps_R in pairs]
    return [replace(batch, ref_logps_R=logps_R) for batch, logps_R in pairs]
