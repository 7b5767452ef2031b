"""Prompts of reasoning-gym's tasks (arXiv 2505.24760), by name and seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from rl.data.gym import SIZE, GymError, gym
from rl.data.rows import DataError, Row
from rl.seeds import fold_in

BLOCK = 50  # entries of one request
SECONDS = 120.0  # for these; a task that takes longer is too slow to train on
REPEATS = 2000  # questions in a row that are no new ones: then there are none left


def reasoning_gym_rows(names: Sequence[str], size: int, seed: int, avoid: Iterable[str] = ()) -> list[Row]:
    """`size` different questions, the tasks taking turns; a function of the arguments alone.

    The key is the task's name, the answer the entry's (None for tasks without a single one). `extra` holds
    its "metadata", and as "reasoning_gym" where it comes from, which the rule `reasoning_gym` scores by.

    Args:
      names: tasks, in the order of their turns.
      avoid: questions that must not come: the other split's.

    Raises DataError for an unknown task, one that is too slow, and one that has too few questions.
    """
    names = list(dict.fromkeys(names))
    try:
        _check(names)
        taken = set(avoid)
        share = {name: size // len(names) + (turn < size % len(names)) for turn, name in enumerate(names)}
        of_task = [_take(name, share[name], seed, taken) for name in names]
    except GymError as error:
        raise DataError(f"data.reasoning_gym: {error}") from None
    return [of_task[i % len(names)][i // len(names)] for i in range(size)]


def _check(names: Sequence[str]) -> None:
    known = gym().tasks()
    for name in names:
        if name not in known:
            close = get_close_matches(name, known)
            meant = f"; close are {', '.join(close)}" if close else f"; there are {', '.join(known)}"
            raise DataError(f"data.reasoning_gym: there is no task {name!r}{meant}")
    if not names:
        raise DataError("data.reasoning_gym: expected at least one task")


def _take(name: str, n: int, seed: int, taken: set[str]) -> list[Row]:
    rows: list[Row] = []
    since = 0
    for row in _all(name, seed, min(n, BLOCK)) if n else ():
        since += 1
        if row.text not in taken:
            taken.add(row.text)
            rows.append(row)
            since = 0
        if len(rows) == n:
            break
        if since == REPEATS:
            raise DataError(
                f"data.reasoning_gym: {name} has only {len(rows)} different questions here of {n} that are "
                "wanted; lower data.size or data.held_out, or add tasks"
            )
    return rows


def _all(name: str, seed: int, block: int) -> Iterator[Row]:
    part = 0
    while True:
        of_part = fold_in(seed, "reasoning_gym", name, part) % 2**31  # tasks may want 32 bits
        for start in range(0, SIZE, block):
            stop = min(start + block, SIZE)
            for index, entry in enumerate(gym().entries(name, of_part, start, stop, SECONDS), start):
                origin = {"task": name, "seed": of_part, "index": index}
                extra = {"metadata": entry["metadata"], "reasoning_gym": origin}
                yield Row(
                    f"reasoning-gym {name} {of_part}/{index}", entry["question"], entry["answer"], name, extra
                )
        part += 1
