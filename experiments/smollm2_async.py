"""smollm2_arith with long answers, to compare asynchronous training (η = 2) with synchronous (η = 0).

benchmarks/asynchrony.py runs both, with `--staleness.max_age 0` as their only difference.

Lengths: of 40 answers to "Compute 7 - 1." and the like, at temperature 1, half had at most 94 tokens, one in
ten had 345 or more, and some did not end at 400. So with room for 512 every batch of 256 waits for answers
five times as long as the median. They get shorter as the model learns, and the tail with them: no length is
imposed. Every group is trained (zero_signal "keep"): synchronous training would wait a second time for what
replaces a dropped one.

Placement: sampler and trainer share one GPU, whose shares are of memory and not of time. So synchronous
training, which uses it in turns, has all of it each time, and asynchronous training gains what the sampler
leaves unused while the last answers of a batch come in. With each on a GPU of its own (--sampler.engine.gpus
1 --trainer.gpus 1) one of the two always rests in synchronous training, which flatters asynchronous; on two
GPUs the fair opponent shares both: --sampler.replicas 2 --trainer.ranks 2 --trainer.gpus 0.6.
"""

from dataclasses import replace

from experiments.smollm2_arith import CONFIG as ARITH
from rl.config import Checkpoint, Staleness

CONFIG = replace(
    ARITH,
    name="smollm2_async",
    sampler=replace(ARITH.sampler, samples=8, max_tokens=512),
    trainer=replace(ARITH.trainer, steps=30, prompts=32, lr=2e-5, final_lr=1.0),
    staleness=Staleness(max_age=2),
    checkpoint=Checkpoint(every=0),
)
