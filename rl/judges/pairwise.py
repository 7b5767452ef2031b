"""Pairwise judging within a group: who meets whom, and what the games say of each answer.

A game (i, j) shows answer i first and j second; its score is the win of the first: 1, 1/2 for a tie, 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Literal

from rl.types import Abstain, InfraFail, ParseFail, Score, Verdict

Game = tuple[int, int]


def schedule(n: int, opponents: int) -> list[Game]:
    """Pairs of n players in which each meets `opponents` others: all for 0, or from n − 1 on.

    Player i is first against i + 1, i + 2, ... (mod n), up to half of the opponents, so each is first as
    often as second, give or take one. An odd number of opponents is completed by a perfect matching; where n
    is odd too there is none, and player 0 meets one more.
    """
    degree = opponents if 0 < opponents < n - 1 else n - 1
    pairs = [(i, (i + step) % n) for step in range(1, degree // 2 + 1) for i in range(n)]
    if degree > 0 and degree % 2 and n % 2 == 0:
        pairs += [(i, i + n // 2) for i in range(n // 2)]
    elif degree > 0 and degree % 2:
        step = n // 2  # has no factor in common with n: i·step passes through all; every second edge of it
        pairs += [(i * step % n, (i + 1) * step % n) for i in range(0, n, 2)]
    return pairs


def games(seeds: Sequence[int], opponents: int, orders: Literal["both", "one"]) -> list[Game]:
    """The schedule over answers in the order of their seeds, each pair in both orders or in one."""
    order = sorted(range(len(seeds)), key=lambda i: seeds[i])
    pairs = [(order[i], order[j]) for i, j in schedule(len(seeds), opponents)]
    return [game for i, j in pairs for game in ([(i, j), (j, i)] if orders == "both" else [(i, j)])]


def win_shares(said: Mapping[Game, Verdict], n: int) -> list[Verdict]:
    """One verdict per answer: its mean win over its games, final only when all of them were read.

        score_i = mean over games of (s where i is first, 1 − s where it is second)

    With both orders this is the mean over pairs of `losses.both_orders`: a judge that only likes the first
    place gives everybody 1/2. One game that was not read makes the answer's score missing: the others alone
    would compare it with other opponents, or in one place only. Without a game: Abstain.
    """
    return [_win_share({game: v for game, v in said.items() if i in game}, i) for i in range(n)]


def missing(failed: Sequence[Verdict]) -> ParseFail | InfraFail:
    """What several verdicts without a score come to: the most common parse failure, its first text with it;
    an infra failure where there was no other."""
    parse = [v.outcome for v in failed if isinstance(v.outcome, ParseFail)]
    if parse:
        status = _most_common([o.status for o in parse])
        return next(o for o in parse if o.status == status)
    return InfraFail(_most_common([v.outcome.why for v in failed if isinstance(v.outcome, InfraFail)]))


def _win_share(said: Mapping[Game, Verdict], i: int) -> Verdict:
    if not said:
        return Verdict(outcome=Abstain("no other answer to compare with"))
    scores = {game: v.outcome.value for game, v in said.items() if isinstance(v.outcome, Score)}
    told = {"games": len(scores)}
    if len(scores) < len(said):
        return Verdict(outcome=missing(list(said.values())), told=told)
    wins = [score if game[0] == i else 1.0 - score for game, score in scores.items()]
    noises = [v.noise for v in said.values() if v.noise is not None]
    noise = fsum(noises) / len(said) ** 2 if len(noises) == len(said) else None
    return Verdict(outcome=Score(fmean(wins)), noise=noise, told=told)


def _most_common(words: Sequence[str]) -> str:
    return max(words, key=words.count)
