"""mdapo: DAPO post-training of dialogue language models on Megatron-core, with SGLang or built-in rollout."""

__version__ = "0.1.0"
