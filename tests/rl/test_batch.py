"""Packed tensors: every trained token keeps its own values, wherever its sequence lies in the row."""

import numpy as np
import pytest
import torch

from losses import linear_logp
from rl.batch import GroupData, GroupTokens, build_micro
from rl.lessons import Lesson
from rl.step import attend_packed
from rl.types import Completion, Scores
from tests.rl.test_step import fresh_model

CPU = torch.device("cpu")


def group(prompt, answers, teacher=None):
    samples = tuple(
        Completion(
            tokens=np.array(a, np.int32),
            logps=np.array([-0.1 * t for t in a], np.float32),
            versions=np.arange(len(a), dtype=np.int32),
            finish="stop",
        )
        for a in answers
    )
    lessons = [
        Lesson(adv=float(i), weight={"policy": 0.5, "kl": 0.25}, distill={"t": 0.125})
        for i in range(len(samples))
    ]
    return GroupData(
        tokens=GroupTokens(np.array(prompt), samples),
        lessons=lessons,
        teachers={"t": teacher} if teacher else {},
    )


def test_o037_each_answer_token_gets_its_own_values_whatever_the_length_of_its_prompt():
    teacher = [Scores(logps=np.array([0.1, 0.2, 0.3], np.float32))]
    groups = {0: group([1, 2], [[3, 4, 5]], teacher), 1: group([1, 2, 3, 4, 5], [[6, 7, 8]], teacher)}
    micro = build_micro([(0, 0), (1, 0)], groups, CPU, current=3)
    assert micro.teachers["t"].logp.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.1, 0.2, 0.3])
    assert micro.target.tolist() == [3, 4, 5, 6, 7, 8]
    assert (
        micro.ids[micro.select + 1].tolist() == micro.target.tolist()
    )  # the state before predicts the token
    assert micro.logp_mu.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.6, -0.7, -0.8])
    assert micro.version.tolist() == [0, 1, 2, 0, 1, 2] and micro.row.tolist() == [0, 0, 0, 1, 1, 1]


@torch.no_grad()
def answer_logps(places, groups):
    model, micro = fresh_model(), build_micro(places, groups, CPU, current=0)
    hidden = model(micro.ids, micro.layout.positions, attend_packed(micro.layout))
    logp, _ = linear_logp(hidden[micro.select], model.head, micro.target)
    return logp, micro.row


def test_o022_log_probs_do_not_depend_on_where_the_sequence_lies():
    groups = {0: group([3, 9, 2], [[5, 6], [7, 8, 9, 10]]), 1: group([4] * 17, [[1, 2, 3], [11]])}
    alone, _ = answer_logps([(0, 1)], groups)
    for places in ([(0, 1), (1, 0)], [(1, 0), (0, 1)], [(1, 1), (0, 0), (1, 0), (0, 1)]):
        packed, row = answer_logps(places, groups)
        assert torch.allclose(packed[row == places.index((0, 1))], alone, atol=1e-5)


def test_a_teacher_has_rows_for_the_tokens_that_it_taught_and_no_others():
    full = [Scores(logps=np.zeros(2, np.float32), full=np.zeros((2, 19), np.float32))]
    groups = {0: group([1], [[2, 3]], full), 1: group([1], [[4]])}
    micro = build_micro([(0, 0), (1, 0)], groups, CPU, current=0)
    (taught,) = micro.teachers.values()
    assert taught.rows is not None and taught.rows.shape == (2, 19) and taught.at.tolist() == [0, 1]
    assert not build_micro([(1, 0)], groups, CPU, current=0).teachers
