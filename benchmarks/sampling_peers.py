"""The peers' policies of dynamic sampling, for `simulate_dynamic_batch.py`, which says what they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from sampling_world import Collect, Policy, Step, Talks, World, data
from simulated import Slots

from mdapo.data.prompts import PromptStream
from mdapo.types import Episode, Group, Prompt

VERL_GEN, VERL_ROUNDS = 3.0, 10  # gen_batch_size over train_prompt_bsz; max_num_gen_batches


def endless(world: World) -> Iterator[Prompt]:
    """Prompts as a data loader deals them: shuffled anew each epoch, and gone once dealt."""
    stream = PromptStream(data(world), seed=world.seed, shuffle=True)
    while True:
        for prompt in stream.next(64):
            stream.commit([prompt.uid])
            yield prompt


def has_spread(group: Group) -> bool:
    return len({e.score.outcome for e in group.episodes if e.score is not None}) > 1


class DeadLoop(Exception):
    """The round limit of verl's recipe."""


def verl(world: World, policy: Policy, slots: Slots) -> Collect:
    talks, prompts, number = Talks(policy, slots), endless(world), iter(range(10**9))

    async def collect(version: int) -> Step:
        talks.engine.version = version
        kept, asked = [], 0
        for _ in range(VERL_ROUNDS):
            wave = [next(prompts) for _ in range(int(VERL_GEN * world.groups))]
            names = [f"{next(number)}/{p.uid}" for p in wave]
            kept += filter(has_spread, await talks.groups(wave, names, n=world.n, version=version))
            asked += len(wave)
            if len(kept) >= world.groups:
                return Step(kept[: world.groups], asked)
        raise DeadLoop

    return collect


def slime(world: World, policy: Policy, slots: Slots, *, goes_on: bool) -> Collect:
    talks, prompts, number = Talks(policy, slots), endless(world), iter(range(10**9))
    buffer: list[tuple[Prompt, str, list[Episode], int]] = []

    async def collect(version: int) -> Step:
        talks.engine.version = version
        data: list[Group] = []
        pending: set[asyncio.Task[tuple[Prompt, str, list[Episode], int]]] = set()
        left, new = 0, 0

        async def run(prompt: Prompt, name: str, had: list[Episode], since: int) -> Any:
            async def one(index: int) -> Episode:
                begun = had[index] if had else None
                if begun is not None and begun.end == "done":
                    return begun
                episode = await talks.talk(prompt, index, name=name, begun=begun)
                return await talks.scored(episode) if episode.end == "done" else episode

            return prompt, name, list(await asyncio.gather(*(one(i) for i in range(world.n)))), since

        while len(data) < world.groups:
            while left < world.groups:
                wave = [buffer.pop(0) for _ in range(min(len(buffer), world.groups))]
                fresh = world.groups - len(wave)
                wave += [(p, f"{next(number)}/{p.uid}", [], version) for p in (next(prompts) for _ in range(fresh))]
                left, new = left + len(wave), new + fresh
                pending |= {asyncio.create_task(run(*item)) for item in wave}
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                prompt, _, episodes, since = task.result()
                group = Group(prompt, tuple(episodes), since)
                if not has_spread(group):
                    left -= 1
                elif len(data) < world.groups:
                    data.append(group)
        slots.abort()
        while not slots.idle:
            await asyncio.sleep(0)
        rest = [await task for task in pending]
        if goes_on:
            buffer.extend(rest)
        return Step(data, new)

    return collect
