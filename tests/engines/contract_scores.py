"""What every engine promises of the tokens it is given; see contract.py."""

import numpy as np
import pytest
import torch

from tests.engines.asked import (
    FREE,
    PROMPT,
    Host,
    build,
    close,
    collect,
    plain_logp,
    plain_token_logp,
    with_engine,
)


class ScoreContract:
    @with_engine
    async def test_scores_equal_a_plain_forward_pass(self, engine, model):
        rng = np.random.default_rng(1)
        sequences = [rng.integers(0, 23, n).tolist() for n in (2, 512, 9, 17, 5, 5)]
        starts = [1, 40, 9, 3, 1, 4]
        out = await engine.score(sequences, starts, top_k=4, full=True, temperature=0.7)
        top = await engine.score(sequences, starts, top_k=4)
        bare = await engine.score(sequences, starts)
        assert await engine.score([], []) == []
        for ids, start, a, b, c in zip(sequences, starts, out, top, bare, strict=True):
            logp = plain_logp(model, ids, 0.7)[start - 1 :]
            close(
                a.logps, logp.gather(-1, torch.tensor(ids[start:], dtype=torch.int64)[:, None])[:, 0].numpy()
            )
            close(a.full, logp.numpy())
            close(a.top_logps, logp.topk(4).values.numpy())
            np.testing.assert_array_equal(
                np.take_along_axis(a.full, a.top_ids.astype(np.int64), 1), a.top_logps
            )
            expected = plain_logp(model, ids)[start - 1 :]
            close(b.top_logps, expected.topk(4).values.numpy())
            close(np.take_along_axis(expected.numpy(), b.top_ids.astype(np.int64), 1), b.top_logps)
            close(b.logps, plain_token_logp(model, ids[:start], ids[start:]))
            close(c.logps, b.logps)
            assert b.full is None and c.top_ids is None and c.top_logps is None
            assert a.logps.shape == (len(ids) - start,) and a.full.shape == (len(ids) - start, 23)
            assert (a.logps.dtype, b.top_ids.dtype, b.top_logps.dtype) == (np.float32, np.int32, np.float32)

    @with_engine
    async def test_scores_of_sampled_tokens_are_their_log_probs(self, engine, model):
        out = await collect(engine, PROMPT, FREE, range(5))
        scores = await engine.score([[*PROMPT, *c.tokens.tolist()] for c in out], [len(PROMPT)] * 5)
        for c, s in zip(out, scores, strict=True):
            close(c.logps, s.logps)

    @with_engine
    async def test_the_log_probs_of_named_tokens_as_the_next_one(self, engine, model):
        expected = plain_logp(model, [*PROMPT, 0])[-1]
        for tokens in ([5], [7, 22, 0, 7], list(range(23))):
            found = await engine.likely(PROMPT, tokens)
            assert found.dtype == np.float32
            close(found, expected[tokens].float().numpy())
        for bad in ([], [23], [-1]):
            with pytest.raises(ValueError, match="likely"):
                await engine.likely(PROMPT, bad)

    @with_engine
    async def test_o075_scores_do_not_depend_on_what_was_read_before(self, engine, model):
        """A prompt of which the cache has some blocks is scored at those positions too."""
        ids = [i * 7 % 23 for i in range(100)]
        expected = plain_token_logp(model, ids[:1], ids[1:])
        for _ in range(2):
            [scores] = await engine.score([ids], [1], top_k=2)
            close(scores.logps, expected)
        await collect(engine, ids[:80], FREE, range(2))
        both = await engine.score([ids, [*ids[:70], 5, 6]], [1, 1])
        close(both[0].logps, expected)
        close(both[1].logps[:69], expected[:69])
        [last] = await engine.score([ids], [99])
        close(last.logps, expected[-1:])

    @pytest.mark.parametrize(
        "sequences, starts, how, names",
        [
            ([[1, 2]], [0], {}, "start from 1"),
            ([[1, 2]], [3], {}, "got 3"),
            ([[1, 2]], [1, 1], {}, "2 starts"),
            ([[]], [1], {}, "token ids"),
            ([[1] * 513], [1], {}, "got 513"),
            ([[1, 23]], [1], {}, r"\[0, 23\)"),
            ([[1, 2]], [1], {"temperature": 0.0}, "temperature"),
            ([[1, 2]], [1], {"top_k": 24}, "top_k"),
        ],
    )
    def test_scores_that_do_not_exist_are_refused(self, host: Host, sequences, starts, how, names):
        async def main():
            engine = await host.engine(build())
            with pytest.raises(ValueError, match=names):
                await engine.score(sequences, starts, **how)
            await host.release(engine)

        host.run(main())
