"""Conversations' counterparts. Short names for configurations, beside ``pkg.mod:name`` and ``file.py:name``."""

BUILTIN: dict[str, str] = {
    "single_turn": "mdapo.environments.single_turn:SingleTurn",
    "gsm8k": "mdapo.environments.gsm8k:Gsm8k",
    "tool_use": "mdapo.environments.tool_use:ToolUse",
    "llm_user": "mdapo.environments.llm_user:LlmUser",
    "customer_service": "mdapo.environments.customer_service:CustomerService",
}
