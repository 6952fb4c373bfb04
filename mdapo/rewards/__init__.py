"""Rewards. Short names that a configuration may use beside ``pkg.mod:name`` and ``file.py:name``."""

BUILTIN: dict[str, str] = {
    "gsm8k": "mdapo.rewards.math:gsm8k",
    "tool_use": "mdapo.rewards.tool_use:tool_use",
    "customer_service": "mdapo.rewards.dialogue:customer_service",
}
