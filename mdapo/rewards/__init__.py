"""Rewards. Short names that a configuration may use beside ``pkg.mod:name`` and ``file.py:name``."""

BUILTIN: dict[str, str] = {
    "gsm8k": "mdapo.rewards.math:gsm8k",
    "customer_service": "mdapo.rewards.dialogue:customer_service",
}
