"""A generator of request traces that look like a chat service: conversations of several turns, all going on at once.

Every conversation begins with one of a few system prompts, and each turn asks for everything said so far and a new
question, so most blocks of a turn were asked for before. The same seed gives the same trace on every machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

from asynckv.commands.trace import Request

__all__ = ["BLOCK_TOKENS", "generate"]

BLOCK_TOKENS = 512
SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = (1024, 4096)
QUESTION_TOKENS = (256, 4096)
ANSWER_TOKENS = (64, 1024)
TURNS = (2, 12)
CONVERSATIONS_AT_ONCE = 24
THINKING_MS = 20_000.0


@dataclass
class _Conversation:
    """One chat: the ids of its full blocks so far, and how many tokens it holds."""

    full: list[int]
    tokens: int
    turns_left: int


class _Ids:
    """Numbers blocks by first appearance."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count - 1


def generate(seed: int, *, blocks: int) -> Iterator[Request]:
    """Yield requests until ``blocks`` distinct blocks were asked for.

    Parameters
    ----------
    seed
        Any int; the same one gives the same requests.
    blocks
        Distinct blocks in all; the last request ends exactly there.

    Yields
    ------
    Request
        Ids are numbered from 0 by first appearance, ``len(hash_ids) == ceil(input_length / 512)``, no id occurs twice
        in one request, and an id always follows the same one.
    """
    draw = random.Random(seed)
    new_id = _Ids()
    systems: list[list[int]] = [[] for _ in range(SYSTEM_PROMPTS)]
    lengths = [draw.randrange(*SYSTEM_TOKENS, BLOCK_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    queue: list[tuple[float, int, _Conversation | None]] = []
    for order in range(CONVERSATIONS_AT_ONCE):
        heapq.heappush(queue, (draw.uniform(0, THINKING_MS), order, None))
    while new_id.count < blocks:
        now, order, talk = heapq.heappop(queue)
        if talk is None:
            which = min(int(draw.expovariate(1.0)), SYSTEM_PROMPTS - 1)
            while len(systems[which]) < lengths[which] // BLOCK_TOKENS and new_id.count < blocks:
                systems[which].append(new_id())
            talk = _Conversation(list(systems[which]), len(systems[which]) * BLOCK_TOKENS, draw.randint(*TURNS))
        request = _turn(talk, now, draw, new_id, blocks)
        if request is not None:
            yield request
        again = talk if talk.turns_left > 0 else None
        heapq.heappush(queue, (now + draw.expovariate(1.0) * THINKING_MS, order, again))


def _turn(talk: _Conversation, now: float, draw: random.Random, new_id: _Ids, blocks: int) -> Request | None:
    """Ask one question: blocks that became full get a lasting id, a partly filled last one an id of its own."""
    tokens = talk.tokens + draw.randint(*QUESTION_TOKENS)
    ids = list(talk.full)
    while len(ids) < tokens // BLOCK_TOKENS and new_id.count < blocks:
        ids.append(new_id())
    cut = len(ids) < tokens // BLOCK_TOKENS
    talk.full = list(ids)
    if cut:
        tokens = len(ids) * BLOCK_TOKENS
    elif tokens % BLOCK_TOKENS and new_id.count < blocks:
        ids.append(new_id())
    else:
        tokens = len(ids) * BLOCK_TOKENS
    answer = draw.randint(*ANSWER_TOKENS)
    talk.tokens = tokens + answer
    talk.turns_left -= 1
    if not ids:
        return None
    return Request(timestamp=round(now, 3), input_length=tokens, output_length=answer, hash_ids=ids)
