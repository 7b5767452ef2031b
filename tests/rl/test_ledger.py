import json
import random

import pytest

from rl.ledger import Event, Ledger, apply, fold, from_json, insert, to_json


def event(kind, ordinal, at=0.0, **more):
    return Event(kind=kind, ordinal=ordinal, at=at, **more)


def life(ordinal, kinds=("issue", "dispatch", "generate", "score", "ready", "train")):
    return [event(kind, ordinal, at=float(i)) for i, kind in enumerate(kinds)]


def test_counts_add_up_after_every_event_of_a_random_history():
    rng = random.Random(0)
    ledger, after = (
        Ledger(),
        {
            "issue": "dispatch",
            "dispatch": "generate",
            "generate": "score",
            "score": "ready",
            "ready": "train",
        },
    )
    for step in range(3000):
        if not ledger.live or rng.random() < 0.2:
            ordinal, _ = ledger.upcoming()
            ledger = apply(ledger, event("issue", ordinal, step))
        else:
            ordinal = rng.choice(sorted(ledger.live))
            if rng.random() < 0.15:
                ledger = apply(ledger, event("drop", ordinal, step, reason="stale", again=rng.random() < 0.5))
            else:
                ledger = apply(ledger, event(after[ledger.live[ordinal].state], ordinal, step))
        assert ledger.balanced
    assert ledger.trained > 100 and sum(ledger.dropped.values()) > 100


def test_an_ordinal_is_trained_once_only():
    ledger = fold(life(0))
    assert ledger.done == ((0, 1),) and ledger.trained == 1
    with pytest.raises(ValueError, match="expected 1"):
        apply(ledger, event("issue", 0))
    with pytest.raises(ValueError, match="already done"):
        insert(ledger.done, 0)


def test_a_dropped_prompt_comes_back_with_the_next_attempt_or_never():
    ledger = fold([event("issue", 0), event("issue", 1), event("drop", 0, reason="stale", again=True)])
    assert ledger.upcoming() == (0, 1)
    ledger = fold([event("issue", 0), event("drop", 1, reason="zero_signal")], ledger)
    assert ledger.live[0].attempt == 1 and ledger.upcoming() == (2, 0)
    assert ledger.done == ((1, 2),) and ledger.issued == 3


def test_events_out_of_order_are_errors():
    with pytest.raises(ValueError, match="not live"):
        apply(Ledger(), event("train", 0))
    with pytest.raises(ValueError, match="in state issue"):
        fold([event("issue", 0), event("train", 0)])


def test_scored_and_taught_in_either_order():
    for pair in (("score", "teach"), ("teach", "score")):
        assert fold(life(0, ("issue", "dispatch", "generate", *pair, "ready", "train"))).trained == 1


def test_stage_seconds_of_trained_groups():
    ledger = fold(life(0))  # one second between events
    assert ledger.seconds == {"generate": 2.0, "judge": 1.0, "teach": 0.0, "train_queue": 1.0}


def test_ranges_merge_on_both_sides():
    ranges = ()
    for ordinal in (3, 1, 5, 4, 2):
        ranges = insert(ranges, ordinal)
    assert ranges == ((1, 6),)


def test_json_round_trip():
    ledger = fold(
        [*life(0), event("issue", 1), event("issue", 2), event("drop", 2, reason="infra", again=True)]
    )
    assert from_json(json.loads(json.dumps(to_json(ledger)))) == ledger
