"""Conversations' counterparts. Short names for configurations, beside ``pkg.mod:name`` and ``file.py:name``."""

BUILTIN: dict[str, str] = {
    "single_turn": "mdapo.environments.single_turn:SingleTurn",
    "gsm8k": "mdapo.environments.gsm8k:Gsm8k",
    "customer_service": "mdapo.environments.customer_service:CustomerService",
}
