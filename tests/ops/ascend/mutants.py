"""Kernels broken on purpose, one edit each, with what the host twin, or a wrong result, must say of them."""

from __future__ import annotations

from dataclasses import dataclass

LOGPROB = "token_logprob/token_logprob_ascend_kernel.cpp"
READER = "token_logprob/token_logprob_ascend_kernel_reader.h"
PACK = "pack/pack_ascend_kernel.cpp"
SHARED = "common/ascend_kernel.h"
WRONG = "wrong result"


@dataclass(frozen=True)
class Mutant:
    """In ``file``, the first ``old`` becomes ``new``; running ``vector`` must end in ``message``, a pattern."""

    name: str
    file: str
    old: str
    new: str
    vector: str  # stats, grad, pack
    message: str


MUTANTS = [
    Mutant(
        "scalar does not wait for the vector unit",
        LOGPROB,
        "    wait_for<AscendC::HardEvent::V_S>();\n    const float largest",
        "    const float largest",
        "stats",
        "hazard: S reads UB byte .* that V wrote",
    ),
    Mutant(
        "vector unit does not wait for the target's scalar",
        LOGPROB,
        "(bounded + terms.entropy)));\n    wait_for<AscendC::HardEvent::S_V>();",
        "(bounded + terms.entropy)));",
        "grad",
        "hazard: V reads UB byte .* that S wrote",
    ),
    Mutant(
        "no barrier between dependent instructions",
        LOGPROB,
        "    AscendC::Exp(exp, x, count);\n    then();",
        "    AscendC::Exp(exp, x, count);",
        "stats",
        "hazard: V (reads|writes) UB byte .* that V (wrote|reads)",
    ),
    Mutant(
        "a barrier of the wrong kind everywhere",
        SHARED,
        "AscendC::PipeBarrier<PIPE_V>()",
        "AscendC::PipeBarrier<PIPE_MTE2>()",
        "grad",
        "hazard: V reads UB byte .* that V wrote",
    ),
    Mutant(
        "a flag without a wait",
        SHARED,
        "  AscendC::WaitFlag<kEvent>(id);\n",
        "",
        "stats",
        "hazard: S writes UB byte .* that V wrote",
    ),
    Mutant(
        "a wait without a flag",
        SHARED,
        "  AscendC::SetFlag<kEvent>(id);\n",
        "",
        "stats",
        "WaitFlag of a flag that is not set: it would hang",
    ),
    Mutant(
        "a fetched chunk is never freed",
        READER,
        "    widen(x, logits, count);\n    queue.FreeTensor(logits);",
        "    widen(x, logits, count);",
        "stats",
        "AllocTensor of a queue without a free buffer: it would hang",
    ),
    Mutant(
        "freed before it is read",
        READER,
        "    then();\n    widen(x, logits, count);\n    queue.FreeTensor(logits);",
        "    then();\n    queue.FreeTensor(logits);\n    widen(x, logits, count);",
        "stats",
        "hazard: MTE2 writes UB byte .* that V reads",
    ),
    Mutant(
        "a chunk is not enqueued",
        READER,
        "    queue.EnQue(logits);\n",
        "",
        "stats",
        "DeQue of an empty queue: it would hang",
    ),
    Mutant(
        "more than the unified buffer holds",
        READER,
        "kChunk = 4096;",
        "kChunk = 16384;",
        "stats",
        "UB has 196608 bytes, the kernel asks for",
    ),
    Mutant(
        "one column too many is read",
        READER,
        "const auto bytes = static_cast<uint32_t>(columns(chunk) * sizeof(T));",
        "const auto bytes = static_cast<uint32_t>((columns(chunk) + (columns(chunk) < kChunk)) * sizeof(T));",
        "stats",
        "a read of .* bytes outside of every GM buffer",
    ),
    Mutant(
        "a length in elements instead of bytes",
        READER,
        "const auto bytes = static_cast<uint32_t>(columns(chunk) * sizeof(T));",
        "const auto bytes = static_cast<uint32_t>(columns(chunk) / 4 * 4);",
        "stats",
        "V reads UB byte .* that nobody wrote",
    ),
    Mutant(
        "numbers that are not 32 bytes apart",
        LOGPROB,
        "kSlot = 8; ",
        "kSlot = 4; ",
        "stats",
        "not 32-byte aligned|past the end of its UB tensor|that nobody wrote",
    ),
    Mutant(
        "sums that were never cleared",
        LOGPROB,
        "    AscendC::Duplicate(part, 0.0F, 3 * kSlots);\n",
        "",
        "stats",
        "V reads UB byte .* that nobody wrote",
    ),
    Mutant(
        "a reduction with too little working space",
        LOGPROB,
        "kWork = 2 * kChunk / 64;",
        "kWork = 8;",
        "stats",
        "the working space of a reduction is too small",
    ),
    Mutant(
        "rounding to bfloat16 without a mode",
        LOGPROB,
        "AscendC::RoundMode::CAST_RINT",
        "AscendC::RoundMode::CAST_NONE",
        "grad",
        "Cast from float32 to bfloat16 takes a rounding mode",
    ),
    Mutant(
        "every core does every row",
        READER,
        "begin = smaller(rows, each * AscendC::GetBlockIdx());\n    end = smaller(rows, begin + each);",
        "begin = 0;\n    end = rows + 0 * each;",
        "stats",
        "a core reads a GM byte that another one wrote|two cores write one GM byte",
    ),
    Mutant(
        "sums of -inf are not bounded",
        LOGPROB,
        "    AscendC::Maxs(x, x, lowest<float>(), count);  // 0 times -inf would be NaN\n",
        "",
        "stats",
        WRONG,
    ),
    Mutant(
        "the gradient forgets the target",
        LOGPROB,
        "if (column >= 0 && column < count) by_target",
        "if (column > 1 << 30) by_target",
        "grad",
        WRONG,
    ),
    Mutant(
        "zeros are sent before they are there",
        PACK,
        "    wait_for<AscendC::HardEvent::V_MTE3>();\n",
        "",
        "pack",
        "hazard: MTE3 reads UB byte .* that V wrote",
    ),
    Mutant(
        "a range ends one token late",
        PACK,
        "end = smaller(tokens, begin + each);",
        "end = smaller(tokens, begin + each + 1);",
        "pack",
        "two cores write one GM byte",
    ),
    Mutant(
        "zeros are left out",
        PACK,
        "    clear(at * item, (end - at) * item);\n",
        "",
        "pack",
        WRONG,
    ),
    Mutant(
        "a transfer larger than its buffer",
        PACK,
        "constexpr int64_t kZeros = 32 * 1024;",
        "constexpr int64_t kZeros = 80 * 1024;",
        "pack",
        "UB has 196608 bytes, the kernel asks for",
    ),
]
