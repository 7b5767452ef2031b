"""The parts of the vLLM engine that need no vLLM: turns, versions, and reading its outputs."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from models.config import ModelConfig
from rl.engines.vllm_args import (
    VllmOptions,
    cache_bytes,
    engine_args,
    environment,
    scratch_bytes,
    weight_bytes,
)
from rl.engines.vllm_outputs import completion, full_scores, no_scores, top_scores
from rl.engines.vllm_room import SET_ASIDE, Room
from rl.engines.vllm_samples import Epochs, Sample, Tally, Turns


def sample(index: int = 0, **how) -> Sample:
    return Sample(request="r", index=index, seed=0, **how)


# ── Turns ───────────────────────────────────────────────────────────────────────


def test_turns_come_in_the_order_of_arrival_and_never_more_than_n_at_a_time():
    async def main():
        turns, order, here, most = Turns(2), [], 0, 0

        async def one(i: int) -> None:
            nonlocal here, most
            assert await turns.wait(sample(i))
            here += 1
            most = max(most, here)
            order.append(i)
            await asyncio.sleep(0.001)
            here -= 1
            turns.release()

        await asyncio.gather(*(one(i) for i in range(7)))
        assert (order, most, turns.taken) == (list(range(7)), 2, 0)

    asyncio.run(main())


def test_a_cut_sample_gets_no_turn_and_the_next_one_gets_it():
    async def main():
        turns, cut, last = Turns(1), sample(1), sample(2)
        assert await turns.wait(sample(0))
        waiting = [asyncio.create_task(turns.wait(s)) for s in (cut, last)]
        await asyncio.sleep(0)
        turns.cut(cut)
        assert await waiting[0] is False
        turns.release()
        assert await waiting[1] is True
        turns.release()
        assert turns.taken == 0 and not turns.queue

    asyncio.run(main())


@pytest.mark.parametrize("had_its_turn", [False, True])
def test_a_caller_that_goes_away_keeps_no_turn(had_its_turn):
    async def main():
        turns = Turns(1)
        assert await turns.wait(sample(0))
        gone = asyncio.create_task(turns.wait(sample(1)))
        await asyncio.sleep(0)
        if had_its_turn:
            turns.release()
        gone.cancel()
        await asyncio.wait([gone])
        if not had_its_turn:
            turns.release()
        assert await turns.wait(sample(2))

    asyncio.run(main())


def test_where_the_room_shrinks_what_runs_goes_on_and_fewer_start():
    async def main():
        turns = Turns(4)
        first = [sample(i) for i in range(4)]
        assert all([await turns.wait(s) for s in first])
        later = [asyncio.create_task(turns.wait(sample(i))) for i in range(4, 8)]
        await asyncio.sleep(0)
        turns.room = Room(slots=4, blocks=SET_ASIDE + 2, need=1)
        for _ in range(2):
            turns.release()
        await asyncio.sleep(0)
        assert turns.taken == 2 and not any(t.done() for t in later)
        turns.release()
        await asyncio.sleep(0)
        assert [t.done() for t in later] == [True, False, False, False]
        turns.room = replace(turns.room, tried=3)
        turns.step(0.5, 0)
        await asyncio.sleep(0)
        assert [t.done() for t in later] == [True, True, False, False] and turns.taken == 3
        for _ in range(3):
            turns.release()
        await asyncio.sleep(0)
        assert all(t.done() for t in later)

    asyncio.run(main())


def test_samples_of_one_prompt_start_before_those_of_a_later_one():
    async def main():
        turns, order = Turns(3), []

        async def one(prompt: str) -> None:
            assert await turns.wait(sample())
            order.append(prompt)
            await asyncio.sleep(0.001)
            turns.release()

        await asyncio.gather(*(one(prompt) for prompt in "aaaabbbbcccc"))
        assert "".join(order) == "aaaabbbbcccc"

    asyncio.run(main())


# ── Versions ────────────────────────────────────────────────────────────────────


def test_an_output_has_the_weights_of_its_own_time_not_of_the_reader_s():
    epochs = Epochs(3)
    epochs.begin(10.0, 4, keep=True)
    epochs.begin(20.0, 5, keep=False)
    assert [epochs.at(t).version for t in (0.0, 9.9, 10.0, 15.0, 20.0, 99.0)] == [3, 3, 4, 4, 5, 5]
    assert [epochs.at(t).salt for t in (9.9, 15.0, 99.0)] == ["0", "1", "1"]


def test_many_updates_are_remembered_in_part_and_the_last_ones_rightly():
    epochs = Epochs(0)
    for v in range(1, 1000):
        epochs.begin(float(v), v, keep=True)
    assert len(epochs.past) <= 64
    assert [epochs.at(v + 0.5).version for v in (990, 998, 999)] == [990, 998, 999]


def tally_of(said: list[Sample], turns: Turns | None = None) -> Tally:
    return Tally(0, turns or Turns(8), said.append)


def processor(*samples: Sample):
    """Stands for vLLM's: it knows its requests, and what it is given."""
    given = []
    states = {f"{s.name}-x": SimpleNamespace(external_req_id=s.name) for s in samples}
    return SimpleNamespace(
        request_states=states,
        given=given,
        process_outputs=lambda outputs, time, *rest, **kw: given.append((outputs, time, rest, kw)),
    )


def output(s: Sample, *times: float, preempted: tuple[float, ...] = (), finish: str | None = None):
    """Tokens that were there at these times, as vllm_scheduler tells them."""
    events = [SimpleNamespace(type=SimpleNamespace(name="PREEMPTED"), timestamp=t) for t in preempted]
    n = len(times)
    told = SimpleNamespace(
        logprobs=np.full((n, 1), -1.5, np.float32), sampled_token_ranks=np.asarray(times, np.float64)
    )
    return SimpleNamespace(
        request_id=f"{s.name}-x",
        new_token_ids=[7] * n,
        new_logprobs=told,
        events=events or None,
        finish_reason=finish,
    )


def test_tokens_are_counted_per_version_by_the_time_at_which_each_was_there():
    said = []
    tally, one, other = tally_of(said), sample(name="a", salt="0"), sample(name="b", salt="0")
    tally.live = {"a": one, "b": other}
    core = processor(one, other)
    tally.attach(core)
    core.process_outputs([output(one, 1.0), output(other, 1.0)], 1.0, None)
    tally.epochs.begin(2.0, 1, keep=True)
    core.process_outputs([output(one, 1.5, 1.9, 2.0, 2.1), output(sample(name="gone"), 2.1)], 2.1)
    assert one.spans == [[0, 3], [1, 2]] and other.spans == [[0, 1]] and not said
    assert tally.sampled_tokens == 6
    c = completion(one, "length", greedy=False)
    assert c.tokens.tolist() == [7] * 5 and c.versions.tolist() == [0, 0, 0, 1, 1]


def test_vllm_sees_the_first_and_the_last_output_of_a_sample_without_tokens_and_all_of_what_is_no_sample():
    tally, one = tally_of([]), sample(name="a", salt="0")
    score = sample(name="score")
    tally.live = {"a": one}
    core = processor(one, score)
    tally.attach(core)
    first, second, last = output(one, 1.0), output(one, 2.0, 3.0), output(one, 4.0, finish="stop")
    other = output(score, 2.0)
    for outputs in ([first], [second, other], [last]):
        core.process_outputs(outputs, 1.0, None, weight_version="v")
    assert core.given == [(x, 1.0, (None,), {"weight_version": "v"}) for x in ([first], [other], [last])]
    assert all((x.new_token_ids, x.new_logprobs) == ([], None) for x in (first, last))
    assert other.new_token_ids == [7] and len(one.tokens) == 4


@pytest.mark.parametrize("keep", [True, False])
def test_a_sample_that_was_submitted_before_an_update_and_begins_after_it_begins_anew(keep):
    """Unless the update emptied the cache, from which older weights' keys could come."""
    said = []
    tally, late, early = tally_of(said), sample(name="a", salt="0"), sample(name="b", salt="0")
    tally.live = {"a": late, "b": early}
    core = processor(late, early)
    tally.attach(core)
    core.process_outputs([output(early, 1.0)], 1.0)
    tally.epochs.begin(2.0, 1, keep=keep)
    core.process_outputs([output(late, 3.0), output(early, 3.0)], 3.0)
    core.process_outputs([output(late, 4.0)], 4.0)
    assert said == ([late] if keep else []) and late.outdated == keep and not early.outdated
    assert tally.sampled_tokens == (2 if keep else 4)
    late.begin("c", tally.epochs.now.salt)
    assert (late.tokens, late.logps, late.spans, late.outdated) == ([], [], [], False)


def test_a_preemption_cuts_the_room_and_an_emptied_cache_does_not():
    """vLLM says of both that samples were preempted, with the next token of each."""
    turns, one = Turns(8), sample(name="a", salt="0")
    turns.room = Room(slots=8, blocks=20, need=5, tried=8)
    tally = tally_of([], turns)
    tally.live = {"a": one}
    core = processor(one)
    tally.attach(core)
    tally.epochs.begin(2.0, 1, keep=False)
    for event, preemptions, limit in ((1.5, 0, 8), (2.0, 0, 8), (2.5, 1, 6), (2.6, 2, 6)):
        core.process_outputs([output(one, 3.0, preempted=(event,))], 3.0)
        tally.record(SimpleNamespace(kv_cache_usage=0.7), None)
        assert (tally.preemptions, turns.room.limit, tally.kv_use) == (preemptions, limit, 0.7)
    assert one.spans == [[1, 4]]


# ── Outputs ─────────────────────────────────────────────────────────────────────


def flat(rows, first=False):
    """FlatLogprobs of rows of (ids, log-probs); with `first` of a prompt, whose first token has none."""
    width = len(rows[0][0])
    starts = [i * width for i in range(len(rows))]
    ends = [start + width for start in starts]
    return SimpleNamespace(
        token_ids=[i for ids, _ in rows for i in ids],
        logprobs=[x for _, logps in rows for x in logps],
        start_indices=[0] * first + starts,
        end_indices=[0] * first + ends,
    )


def ended(tokens: list[int], *logps: float, spans=None) -> Sample:
    s = sample(name="a", spans=spans or [[0, len(tokens)]])
    s.tokens, s.logps = tokens, [np.asarray([x], np.float32) for x in logps]
    return s


def test_a_completion_has_tokens_log_probs_and_versions_of_one_length():
    c = completion(ended([5, 6, 7], -1.0, -2.0, -3.0, spans=[[3, 2], [4, 1]]), "stop", greedy=False)
    assert (c.tokens.tolist(), c.logps.tolist(), c.versions.tolist()) == ([5, 6, 7], [-1, -2, -3], [3, 3, 4])
    assert (c.tokens.dtype, c.logps.dtype, c.versions.dtype) == (np.int32, np.float32, np.int32)
    assert c.finish == "stop"
    empty = completion(sample(name="b"), "abort", greedy=False)
    assert len(empty.tokens) == len(empty.logps) == len(empty.versions) == 0 and empty.finish == "abort"
    assert (empty.tokens.dtype, empty.logps.dtype, empty.versions.dtype) == (np.int32, np.float32, np.int32)


@pytest.mark.parametrize("tokens, reason", [([5, 2], "length"), ([5, 6], "stop")])
def test_o074_how_an_answer_ended_is_what_the_engine_says_and_not_its_last_token(tokens, reason):
    """2 ends answers: the first was cut although it is there, the second was stopped by something else."""
    assert completion(ended(tokens, -1.0, -1.0), reason, greedy=False).finish == reason


def test_what_does_not_add_up_is_an_error():
    with pytest.raises(RuntimeError, match="2 log-probs and 1 times"):
        completion(ended([5, 6], -1.0, -2.0, spans=[[0, 1]]), "stop", greedy=False)
    with pytest.raises(RuntimeError, match="'error'"):
        completion(sample(name="a"), "error", greedy=False)


def test_scores_are_read_from_the_last_positions_of_a_prompt():
    rows = [([7, 1, 2], [-3.0, -0.5, -1.0]), ([2, 2, 5], [-0.1, -0.1, -4.0])]
    s = top_scores(flat(rows, first=True), 1, 2)
    assert s.top_ids is not None and s.top_logps is not None and s.full is None
    np.testing.assert_allclose(s.logps, [-0.1], rtol=1e-6)
    assert s.top_ids.tolist() == [[2, 5]] and s.logps.dtype == np.float32
    assert top_scores(flat([([7], [-3.0])], first=True), 1, 0).top_ids is None


def test_scores_at_another_temperature_are_those_of_the_logits_divided_by_it():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 9)) * 3
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    order = np.argsort(-logp, axis=1)
    targets = [3, 0, 8, 8]
    rows = [([t, *o], [p[t], *p[o]]) for t, o, p in zip(targets, order, logp, strict=True)]
    s = full_scores(flat(rows), targets, 3, True, 0.7)
    expected = logits / 0.7 - np.logaddexp.reduce(logits / 0.7, axis=1, keepdims=True)
    assert s.full is not None and s.top_ids is not None
    np.testing.assert_allclose(s.full, expected, rtol=1e-5)
    np.testing.assert_allclose(s.logps, expected[range(4), targets], rtol=1e-5)
    assert s.top_ids.tolist() == order[:, :3].tolist()
    none = no_scores(9, 3, True)
    assert none.full is not None and none.full.shape == (0, 9)


# ── Arguments ───────────────────────────────────────────────────────────────────

CFG = ModelConfig(
    vocab_size=23, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=48, max_len=64
)


def test_arguments_leave_room_for_the_token_that_scoring_samples_and_for_the_probe():
    args = engine_args(CFG, "folder", "cpu", 8, 64, VllmOptions())
    assert (args["max_model_len"], args["max_num_seqs"]) == (65, 9)
    assert args["logprobs_mode"] == "processed_logprobs" and args["max_logprobs"] == -1
    assert args["kv_cache_memory_bytes"] == cache_bytes(CFG, 8, 65) >= 9 * 65 * 2 * 2 * 32 * 4
    total = 10**11
    options = VllmOptions(memory=0.3, tensor_parallel=2, compile=False, updates=False)
    gpu = engine_args(CFG, "folder", "cuda", 8, 64, options, total=total)
    assert (gpu["gpu_memory_utilization"], gpu["tensor_parallel_size"], gpu["enforce_eager"]) == (
        0.3,
        2,
        True,
    )
    weights, scratch = weight_bytes(CFG, 2), scratch_bytes(CFG, 8, options)
    assert gpu["kv_cache_memory_bytes"] == int(0.3 * total - weights - scratch)


def test_a_variable_that_is_set_already_wins(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment("cpu", VllmOptions(threads=3))["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in environment("cpu", VllmOptions(threads=3))
