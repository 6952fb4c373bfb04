"""Every key there is. A closed schema: an unknown key is an error, so is a wrong type, nothing is coerced silently.

Names are verl's where verl has the concept. ``configs/README.md`` describes each key; a test holds the two together.
This package imports no torch, so that ``mdapo check`` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_WHOLE = 2**31 - 1  # more is a slip of the pen, and fits in no tensor of indices or lengths
Positive = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
MAX_NUMBER = 1e6  # more is a slip of the pen, and would end as infinity in the middle of a run
PositiveFloat = Annotated[float, Field(gt=0.0, le=MAX_NUMBER)]
MAX_WAIT_S = 86400.0  # a day is what ranks wait for rank 0; poll() and sockets overflow at some weeks
Seconds = Annotated[float, Field(ge=0.001, le=MAX_WAIT_S)]  # below a millisecond poll() does not wait at all
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=MAX_NUMBER)]
SignedFloat = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
LearningRate = Annotated[float, Field(ge=0.0, le=1.0)]
MIN_TEMPERATURE = 0.01  # logits divided by less overflow, or leave one token
CorrectionLevel = Literal["token", "sequence", "geometric"]
AggMode = Literal["token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Plugin(Section):
    """A named built-in, ``pkg.mod:name`` or ``path/file.py:name``, with the keyword arguments it is called with."""

    name: str
    args: dict[str, Any] = {}


class EnvironmentCfg(Plugin):
    name: str = "single_turn"
    timeout_s: Seconds = 120.0  # of one call: the opening, or the answer to a turn
    max_running: Positive = 64  # calls at the same time


class Run(Section):
    name: str = "run"
    dir: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # what numpy's generators take
    total_steps: Positive = 100
    eval_every: NonNegative = 0  # steps; 0: never in between
    eval_before: bool = True
    eval_after: bool = True
    save_every: NonNegative = 0  # steps; the last checkpoint is always written
    keep_checkpoints: Positive = 2
    export_hf: bool = True  # write hf/ at the end
    resume: Literal["auto", "never"] = "auto"
    # deadline of start-up and of each collective
    init_timeout_s: Annotated[float, Field(ge=1.0, le=MAX_WAIT_S)] = 600.0
    threads: Annotated[int, Field(ge=0, le=4096)] = 0  # CPU threads of one rank; 0: cores / ranks


class Model(Section):
    path: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # fp32 master weights either way
    max_context: Positive = 4096  # tokens of prompt and response together
    tokenizer_path: str | None = None  # default: path
    chat_template: str | None = None  # a file; default: the tokenizer's own
    ref_path: str | None = None  # reference model of a KL term; default: path


class Data(Section):
    train_files: list[str]
    val_files: list[str] = []
    train_prompt_bsz: Positive = 8  # groups of an optimizer batch
    gen_batch_size: Positive | None = None  # prompts of a generation round; default: train_prompt_bsz
    max_prompt_len: Positive = 1024
    overlong_prompts: Literal["drop", "error"] = "drop"
    shuffle: bool = True
    prompt_key: str = "prompt"
    system_prompt: str | None = None  # put before rows that have none
    val_limit: NonNegative = 0  # evaluate on the first so many prompts; 0: all


class ValSampling(Section):
    n: Positive = 1
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0


class AdaptiveLengths(Section):
    """Budgets that follow the dialogues' turns (mdapo/algorithms/lengths.py)."""

    enable: bool = False
    turns_above: PositiveFloat = 5.0  # mean turns of a dialogue
    longer: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.5  # times the base
    turns_below: PositiveFloat = 2.0
    shorter: Annotated[float, Field(ge=0.001, le=1.0)] = 0.7
    hysteresis: NonNegativeFloat = 0.5  # turns
    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9  # of a step's weight in the running mean, a step
    max_token_len: Positive | None = None  # most of actor.ppo_max_token_len; default: what memory allows


class Rollout(Section):
    engine: Literal["local", "sglang"] = "local"
    mode: Literal["sync", "partial", "async"] = "sync"
    over_sampling: Annotated[float, Field(ge=1.0, le=1000.0)] = 2.0  # groups under way for each one wanted, in partial
    max_staleness: NonNegative = (
        1  # weight versions that a group's oldest token may be behind the step that trains on it
    )
    urls: list[str] = []
    num_servers: Positive | None = None  # that mdapo starts; default: as many as its devices hold, 1 on a CPU
    tp: Positive = 1  # devices of a server
    server_python: str | None = None  # interpreter with SGLang; default: this one
    start_timeout_s: Annotated[float, Field(ge=1.0, le=MAX_WAIT_S)] = 600.0
    router: str | None = None  # URL of SGLang's router before these servers
    key_file: str | None = None  # with the API key of urls and router
    n_resp_per_prompt: Positive = 8
    max_turns: Positive = 1  # assistant turns
    stop: list[Annotated[str, Field(min_length=1)]] = []  # a turn ends after a token with one of these in it
    max_response_len: Positive = 512  # tokens after the prompt: the policy's and the environment's
    max_turn_len: Positive | None = None  # tokens of one assistant turn; default: what is left of max_response_len
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegative = 0
    val: ValSampling = ValSampling()
    dtype: Literal["float32", "bfloat16"] | None = None  # of the local engine; default: model.dtype
    max_running: Positive = 64  # dialogues decoded together
    episode_timeout_s: Seconds = 600.0
    adaptive_lengths: AdaptiveLengths = AdaptiveLengths()
    engine_args: dict[str, Any] = {}


class OverlongBuffer(Section):
    enable: bool = False
    len: Positive | Literal["auto"] = 128
    penalty_factor: NonNegativeFloat = 1.0


class RewardCfg(Section):
    functions: list[RewardPart] = []  # default: the environment's own
    timeout_s: Seconds = 30.0
    workers: NonNegative = 0  # killable processes; 0: in this process (built-in rewards only)
    max_error_rate: Fraction = 0.2  # above it, over a step, the run stops
    overlong_buffer_cfg: OverlongBuffer = OverlongBuffer()


class RewardPart(Plugin):
    weight: SignedFloat = 1.0


class FilterGroups(Section):
    enable: bool = True
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = "acc"
    max_num_gen_batches: Positive = 10
    on_limit: Literal["train_partial", "skip", "stop"] = "train_partial"
    tolerance: Fraction = 1e-6  # relative: spread at or below it counts as none
    carry_over: bool = True


class Advantage(Section):
    """What a token is credited with (mdapo/algorithms/advantages.py, turn_credit.py)."""

    credit: Literal["episode", "turn"] = "episode"
    turn_share: Fraction = 1.0  # of a token's advantage, that of its own turn; the rest is the episode's
    turn_gamma: Fraction = 1.0  # per turn of the policy


class Kl(Section):
    enable: bool = False
    where: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    coef: NonNegativeFloat = 0.001


class RolloutCorrection(Section):
    """What is done about tokens that another policy than the actor's wrote (mdapo/algorithms/corrections.py)."""

    rollout_is: CorrectionLevel | None = None  # importance weights, truncated; None: off
    rollout_is_threshold: Annotated[float, Field(ge=1.0, le=MAX_NUMBER)] = 2.0
    rollout_rs: CorrectionLevel | None = None  # tokens or sequences masked; None: off
    rollout_rs_threshold: Annotated[float, Field(ge=1.0, le=MAX_NUMBER)] | None = None
    # None: 1 / rollout_rs_threshold
    rollout_rs_threshold_lower: Annotated[float, Field(ge=1.0 / MAX_NUMBER, le=1.0)] | None = None


class Algorithm(Section):
    name: Literal["dapo", "grpo", "dr_grpo", "gspo", "gmpo", "rloo", "reinforce++"] = "dapo"
    # None: what the algorithm of that name does (mdapo/config/presets.py)
    advantage_estimator: Literal["group_norm", "group_mean", "rloo", "reinforce++"] | None = None
    policy_loss: Literal["token_clip", "gspo", "gmpo"] | None = None
    loss_agg_mode: AggMode | None = None
    clip_ratio_low: PositiveFloat | None = None
    clip_ratio_high: PositiveFloat | None = None
    clip_ratio_c: Annotated[float, Field(gt=1.0, le=MAX_NUMBER)] | None = None  # dual clip; None: off
    entropy_coef: SignedFloat = 0.0
    mask_truncated: bool = False  # truncated episodes carry no loss
    gamma: Fraction = 1.0  # per token of the policy; of the episode's part
    advantage: Advantage = Advantage()
    kl: Kl = Kl()
    filter_groups: FilterGroups = FilterGroups()
    rollout_correction: RolloutCorrection = RolloutCorrection()


class Actor(Section):
    lr: LearningRate = 1e-6
    lr_warmup_steps: NonNegative = 0
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: LearningRate = 0.0
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    eps: Annotated[float, Field(ge=1e-20, le=1.0)] = 1e-8  # below, it is 0 in float32
    clip_grad: NonNegativeFloat = 1.0  # 0: off
    ppo_mini_batch_size: Positive | None = None  # groups of one optimizer step; default: train_prompt_bsz
    ppo_epochs: Positive = 1
    use_dynamic_bsz: bool = True  # micro-batches cut by tokens; false: by ppo_micro_batch_size samples
    ppo_max_token_len: Positive = 8192  # hard cap on tokens of a micro-batch
    ppo_micro_batch_size: Positive = 4
    over_cap: Literal["error", "alone"] = "error"  # one sequence longer than the cap
    use_remove_padding: bool = True  # false: pad every row of a micro-batch to its longest (slow; a reference)
    share_prefix: Literal["auto"] | bool = "auto"  # common beginnings computed once; auto: wherever padding is removed
    recompute: Literal["none", "selective", "full"] = "none"
    offload: Literal["none", "gradients", "optimizer"] = "none"  # what leaves the device while the engine works


class Sync(Section):
    """New weights from the actor to SGLang's servers."""

    mode: Literal["tensor", "distributed", "disk"] | None = None  # default: tensor, or distributed to other machines
    bucket_mb: Annotated[int, Field(ge=1, le=65536)] = 512  # MiB of weights under way at a time
    timeout_s: Annotated[float, Field(ge=1.0, le=MAX_WAIT_S)] = 300.0  # of one bucket, and of any other call
    dir: str | None = None  # of mode disk; default: the run's folder
    check: bool = False  # after each sync, compare the servers' log-probs with the actor's


class Parallel(Section):
    tensor: Positive = 1
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    sequence: bool = False
    data: Positive | None = None  # default: ranks / (tensor * pipeline)
    distributed_optimizer: bool = True


class DeviceGroup(Section):
    name: Annotated[str, Field(min_length=1)]
    device: Literal["cpu", "cuda", "npu"] | None = None  # default: the best there is
    ids: list[NonNegative] = []  # of those that the job sees; empty: all


class Placement(Section):
    """Who runs on which devices of a machine."""

    groups: list[DeviceGroup] = []
    actor: str | None = None  # a group's name; default: every device
    rollout: str | None = None  # default: where the actor is


class Megatron(Section):
    """Megatron-core's own options by their own names, checked against the installed version."""

    transformer: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    ddp: dict[str, Any] = {}


class Tracking(Section):
    tensorboard: bool = False
    episodes_per_step: NonNegative = 8  # conversations written as text to episodes/; 0: none
    replay: bool = False  # write every step's groups to replay/


class Debug(Section):
    mode: Literal["full", "rollout", "train"] = "full"
    replay: str | None = None  # a run's replay/ folder, with mode: train


class Config(Section):
    run: Run = Run()
    model: Model
    data: Data
    environment: EnvironmentCfg = EnvironmentCfg()
    reward: RewardCfg = RewardCfg()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    actor: Actor = Actor()
    sync: Sync = Sync()
    parallel: Parallel = Parallel()
    placement: Placement = Placement()
    megatron: Megatron = Megatron()
    tracking: Tracking = Tracking()
    debug: Debug = Debug()
