"""Throughput of a generative judge in the loop: the recipe of verl's pull request 6044, on two GPUs.

A 0.5B policy, a 3B judge, 3,200 prompts with 4 samples of 512 tokens, no KL, clip 0.2 and 0.28, lr 1e-6. Of
verl's 200 versions each is one optimiser step over 16 prompts here, where verl makes four of 4 prompts. The
weights are random, so every answer has all 512 tokens, and the score is read from the probabilities of the
judge's next token (verl: a written integer). With checkpoints: --policy Qwen/Qwen2.5-0.5B-Instruct
--judge Qwen/Qwen2.5-3B-Instruct --data gsm8k/train.jsonl --data.chat always --judge.chat.

Each GPU has a judge, one beside the sampler, one beside the trainer: judging is most of the arithmetic, and
vLLM's Python limits the sampler. The shares keep sampler and trainer apart.
On one GPU: --sampler.engine.gpus 0.3 --judge.replicas 1 --judge.engine.gpus 0.35 --trainer.gpus 0.35.
"""

from rl.config import (
    Checkpoint,
    Config,
    Data,
    Engine,
    Judge,
    Loss,
    Policy,
    Reward,
    Sampler,
    Staleness,
    Trainer,
)

NUMBERS = tuple(str(n) for n in range(1, 10))
CONFIG = Config(
    name="genrm_grpo_seed",
    data=Data(reasoning_gym=("gsm_symbolic",), size=3200, held_out=64, too_long="truncate_left"),
    policy=Policy(model="random-0.5B"),
    sampler=Sampler(samples=4, max_tokens=512, slots=512, engine=Engine(kind="vllm", gpus=0.52)),
    judge=Judge(
        model="random-3B",
        template="Problem: {problem}\n\nSolution: {candidate}\n\nHow good is the solution, from 1 to 9? ",
        format="logprob",
        labels=NUMBERS,
        values=tuple(map(float, NUMBERS)),
        lo=1.0,
        hi=9.0,
        coverage=0.01,
        slots=256,
        replicas=2,
        engine=Engine(kind="vllm", gpus=0.4),
    ),
    reward=Reward(judge=1.0, rule_name="gsm8k"),
    loss=Loss(eps_low=0.2, eps_high=0.28, dual_clip=10.0),
    trainer=Trainer(steps=200, prompts=16, lr=1e-6, warmup=0, final_lr=1.0, betas=(0.9, 0.999),
                    weight_decay=0.1, micro_tokens=40_960, share_prompt=True, gpus=0.5),
    staleness=Staleness(max_age=7),
    checkpoint=Checkpoint(every=0),
)  # fmt: skip
