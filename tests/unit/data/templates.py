"""Small chat templates in the manner of well-known families, and a byte-level tokenizer trained on a few lines."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# One system message is always there; every message closes with <|im_end|> and a line break.
SMOLLM2 = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are a small assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tool answers stand inside a user turn; neighbours share one.
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As Qwen's: declarations in the system turn.
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if not (tools and loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As above, but thoughts of assistant turns before the last question are taken out.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content and loop.index0 < ns.last"
    " else m.content %}"
    "<|im_start|>assistant\n{{ said }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# No line break between turns; texts are trimmed; tool answers have a name of their own.
LLAMA3 = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Prints the day unless it is told one.
DATED = (
    "<|im_start|>system\nToday is "
    "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}.<|im_end|>\n" + SMOLLM2
)

NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}" + SMOLLM2
)
SILENT_TOOLS = SMOLLM2.replace(
    "<|im_start|>{{ m.role }}\n", "{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
).replace("{{ m.content }}<|im_end|>\n", "{{ m.content }}<|im_end|>\n{% endif %}")
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + SMOLLM2
)
ALTERNATING = (
    "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + SMOLLM2
)
ONE_ROUND = "{% if messages | length > 2 %}{{ raise_exception('one round only') }}{% endif %}" + SMOLLM2
FORGETFUL = "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
# Only the last three messages are shown.
LAST_THREE = (
    "{% for m in messages[-3:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
BROKEN = "{% for m in messages %}{{ m.content }"

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
LINES = [
    "You are a small assistant. You help. Hello. Good morning. Yes, of course. And then?",
    "system\nuser\nassistant\ntool\n\n<tool_response>\n</tool_response>\n<think>\n</think>\n\n",
    "Words of the user. Words of the assistant. Where is my parcel? Order 12345, please.",
]


# Line breaks in a row are one piece (Llama 3, Qwen); GPT-2's rule leaves the last one to the word that follows.
MODERN = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@cache
def _trained(split: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    return tokenizer.to_str()


def small_tokenizer(template: str | None, split: str = MODERN) -> PreTrainedTokenizerFast:
    """Its eos is wrong on purpose, as SmolLM2's is."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(split)), bos_token="<|begin|>", eos_token="<|im_start|>"
    )
    tokenizer.chat_template = template
    return tokenizer
