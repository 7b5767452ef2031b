"""What a config must satisfy before anything starts: plain rules, each with what to do about it."""

from __future__ import annotations

import json

from rl.config import Config, ConfigError


def check(cfg: Config) -> None:
    """Raises ConfigError with every fault found, one a line, before anything starts."""
    faults = [message for bad, message in _rules(cfg) if bad]
    if faults:
        raise ConfigError("\n".join(faults))


def _rules(cfg: Config) -> list[tuple[bool, str]]:
    s, t, loss, st = cfg.sampler, cfg.trainer, cfg.loss, cfg.staleness
    sampled_only = loss.distill_form == "advantage"
    return [
        (st.max_age < 0, f"staleness.max_age (η) must be >= 0, got {st.max_age}; 0 is synchronous training"),
        (st.attempts < 1, f"staleness.attempts must be >= 1, got {st.attempts}"),
        (s.samples < 1, f"sampler.samples must be >= 1, got {s.samples}"),
        (
            cfg.uses_reward and s.samples == 1,
            "sampler.samples is 1 but the policy term uses a group baseline, so every advantage is zero: "
            "use sampler.samples >= 2, or loss.policy 0 with a teacher",
        ),
        (
            s.temperature <= 0,
            f"sampler.temperature must be > 0, got {s.temperature}: greedy samples teach nothing",
        ),
        (s.max_tokens < 1, f"sampler.max_tokens must be >= 1, got {s.max_tokens}"),
        (
            s.slots < s.samples,
            f"sampler.slots ({s.slots}) cannot hold a group of sampler.samples ({s.samples})",
        ),
        (s.replicas < 1, f"sampler.replicas must be >= 1, got {s.replicas}"),
        (t.steps < 1, f"trainer.steps must be >= 1, got {t.steps}"),
        (t.prompts < 1, f"trainer.prompts must be >= 1, got {t.prompts}"),
        (t.ranks < 1, f"trainer.ranks must be >= 1, got {t.ranks}"),
        (
            t.prompts < t.ranks,
            f"trainer.prompts ({t.prompts}) must be >= trainer.ranks ({t.ranks}): every rank needs a group",
        ),
        (t.lr < 0, f"trainer.lr must be >= 0, got {t.lr}"),
        (not 0 <= t.final_lr <= 1, f"trainer.final_lr is a share of lr, in [0, 1], got {t.final_lr}"),
        (t.micro_tokens < 1, f"trainer.micro_tokens must be >= 1, got {t.micro_tokens}"),
        (t.shard is False and t.offload, "trainer.offload is of shards: leave trainer.shard out"),
        (
            t.exchange == "memory" and (t.ranks == 1 or t.offload or bool(t.shard)),
            "trainer.exchange memory is for several ranks that each have all weights: no shard, no offload",
        ),
        (
            loss.policy == 0 and loss.distill == 0,
            "nothing to learn from: loss.policy and loss.distill are both 0",
        ),
        (
            loss.policy != 0 and not cfg.uses_reward and not (cfg.uses_teachers and sampled_only),
            "loss.policy needs an advantage: set reward.judge, scalar, rule or fn, or distil with "
            "loss.distill_form advantage, or set loss.policy 0",
        ),
        (
            cfg.uses_teachers and sampled_only and loss.policy == 0,
            "loss.distill_form advantage acts through the policy term: set loss.policy 1",
        ),
        (
            cfg.uses_teachers and sampled_only and loss.distill_top_k != 0,
            "loss.distill_top_k has no effect with loss.distill_form advantage: set it to 0",
        ),
        (cfg.uses_teachers and not cfg.teachers, "loss.distill is not 0 but there are no teachers"),
        (cfg.data.held_out < 0, f"data.held_out must be >= 0, got {cfg.data.held_out}"),
        (
            sum(map(bool, (cfg.data.file, cfg.data.reasoning_gym, cfg.data.arithmetic))) > 1,
            "data.file, data.reasoning_gym and data.arithmetic are different sources: set one of them",
        ),
        (
            cfg.data.largest < 9,
            f"data.largest: what is held out has numbers up to 9, so it must be >= 9, got {cfg.data.largest}",
        ),
        (
            cfg.data.largest != 9 and not cfg.data.arithmetic,
            "data.largest has no effect without data.arithmetic",
        ),
        *_engine_rules(cfg),
        *_reward_rules(cfg),
        *_judge_rules(cfg),
        *_dispatch_rules(cfg),
        *_loss_rules(cfg),
        *_stream_rules(cfg),
        *_teacher_rules(cfg),
    ]


def _engine_rules(cfg: Config) -> list[tuple[bool, str]]:
    teachers = {f"teachers.{name}": teacher.engine for name, teacher in cfg.teachers.items()}
    engines = {"sampler": cfg.sampler.engine, "judge": cfg.judge.engine, "scalar": cfg.scalar.engine}
    rules = [
        (cfg.trainer.gpus <= 0, f"trainer.gpus must be > 0, got {cfg.trainer.gpus}"),
        (
            cfg.trainer.gpus > 1,
            f"trainer.gpus is of one rank, at most 1, got {cfg.trainer.gpus}: raise trainer.ranks",
        ),
    ]
    for name, engine in (engines | teachers).items():
        n = engine.tensor_parallel
        rules += [
            (engine.gpus < 0, f"{name}.engine.gpus must be >= 0, got {engine.gpus}"),
            (n < 1, f"{name}.engine.tensor_parallel must be >= 1, got {n}"),
            (
                engine.gpus > 1 and engine.gpus != n,
                f"{name}.engine.gpus is {engine.gpus:g}: a share of at most 1, or as many as its "
                f"tensor_parallel ({n})",
            ),
            (
                n > 1 and engine.gpus != n,
                f"{name}.engine.tensor_parallel {n} wants {name}.engine.gpus {n}, got {engine.gpus:g}",
            ),
            (
                n > 1 and engine.kind == "torch",
                f"{name}.engine.kind torch has no tensor_parallel: set {name}.engine.kind vllm",
            ),
        ]
    return rules


def _reward_rules(cfg: Config) -> list[tuple[bool, str]]:
    r = cfg.reward
    return [
        (
            bool(cfg.reward.fn_weights) and len(cfg.reward.fn_weights) != len(cfg.reward.fn),
            f"reward.fn_weights has {len(cfg.reward.fn_weights)} weights for {len(cfg.reward.fn)} functions",
        ),
        (
            any(":" not in spec for spec in cfg.reward.fn),
            f'reward.fn: write each function as "path/to/file.py:name", got {cfg.reward.fn}',
        ),
        (cfg.reward.fn_workers < 1, f"reward.fn_workers must be >= 1, got {cfg.reward.fn_workers}"),
        (cfg.reward.fn_deadline <= 0, f"reward.fn_deadline must be > 0, got {cfg.reward.fn_deadline}"),
        (not _is_object(r.fn_kwargs), f"reward.fn_kwargs must be a JSON object, got {r.fn_kwargs!r}"),
        (r.ramp < 0, f"reward.ramp must be >= 0, got {r.ramp}"),
        (r.rate < 0, f"reward.rate is in calls per minute, >= 0, got {r.rate}"),
        (
            r.sandbox_url != "" and not r.fn,
            "reward.sandbox_url is for functions that run code: set reward.fn",
        ),
        (r.sandbox_concurrency < 1, f"reward.sandbox_concurrency must be >= 1, got {r.sandbox_concurrency}"),
        (r.sandbox_memory_mb < 1, f"reward.sandbox_memory_mb must be >= 1, got {r.sandbox_memory_mb}"),
        (
            cfg.uses_scalar and r.judge != 0 and cfg.scalar.activation == "none",
            "reward.judge and reward.scalar are added, but a raw logit has no scale: set scalar.activation "
            "sigmoid, or use one of them",
        ),
    ]


def _is_object(text: str) -> bool:
    try:
        return text == "" or isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _judge_rules(cfg: Config) -> list[tuple[bool, str]]:
    """What a judge's section must satisfy on its own. (Its template: rl/judges/questions.py.)"""
    j = cfg.judge
    if not cfg.uses_judge:
        return []
    return [
        (not j.lo < j.hi, f"judge.lo must be below judge.hi, got {j.lo} and {j.hi}"),
        (j.votes < 1, f"judge.votes must be >= 1, got {j.votes}"),
        (j.max_tokens < 1, f"judge.max_tokens must be >= 1, got {j.max_tokens}"),
        (j.temperature < 0, f"judge.temperature must be >= 0, got {j.temperature}"),
        (
            j.votes > 1 and j.temperature == 0,
            "judge.votes > 1 at judge.temperature 0 are the same vote: set a temperature, or 1 vote",
        ),
        (j.votes > 1 and j.format == "logprob", "judge.format logprob does not sample: set judge.votes 1"),
        (
            j.format == "pairwise" and cfg.sampler.samples < 2,
            "judge.format pairwise compares the answers of a group: set sampler.samples >= 2",
        ),
        (
            j.format == "pairwise" and not 0 <= j.opponents < cfg.sampler.samples,
            f"judge.opponents must lie in 0..sampler.samples - 1 ({cfg.sampler.samples - 1}), "
            f"got {j.opponents}",
        ),
        (
            bool(j.urls) and j.model == "demo",
            "judge.urls: the servers must be told which model they are asked for: set judge.model",
        ),
        (
            any(not url.startswith(("http://", "https://")) for url in j.urls),
            f"judge.urls: write each as http://host:port/v1, got {j.urls}",
        ),
        (not j.urls and j.replicas < 1, f"judge.replicas must be >= 1, got {j.replicas}"),
    ]


def _dispatch_rules(cfg: Config) -> list[tuple[bool, str]]:
    d, v, h = cfg.dispatch, cfg.validation, cfg.health
    positive = {
        "dispatch.attempt": d.attempt, "dispatch.attempts": d.attempts, "dispatch.breaker": d.breaker,
        "dispatch.rest": d.rest, "dispatch.in_flight": d.in_flight, "dispatch.queue": d.queue,
        "dispatch.patience": d.patience, "health.every": h.every,
    }  # fmt: skip
    return [
        *((value <= 0, f"{name} must be > 0, got {value}") for name, value in positive.items()),
        (d.affinity < 0, f"dispatch.affinity must be >= 0, got {d.affinity}"),
        (v.every < 0, f"validation.every must be >= 0, got {v.every}"),
        (not 0 < v.share <= 1, f"validation.share must lie in (0, 1], got {v.share}"),
        (
            v.every > 0 and cfg.data.held_out == 0,
            "validation.every needs held-out prompts: set data.held_out",
        ),
        (h.canaries < 0, f"health.canaries must be >= 0, got {h.canaries}"),
        (
            cfg.staleness.pick != "" and ":" not in cfg.staleness.pick,
            f'staleness.pick: write it as "path/to/file.py:name", got {cfg.staleness.pick!r}',
        ),
    ]


def _loss_rules(cfg: Config) -> list[tuple[bool, str]]:
    """Compositions of losses that cannot mean what they say. (Numbers that none takes: rl/forms.py.)"""
    loss, fix, off_policy = cfg.loss, cfg.correction, cfg.staleness.max_age > 0
    by_token = cfg.uses_teachers and loss.distill_form == "advantage"
    weighted = fix.weight != "none"
    return [
        (
            weighted and fix.prox == "sampler" and loss.form != "reinforce",
            f"correction.weight {fix.weight} counts the ratio twice: loss.form {loss.form} holds π/μ. "
            "Set correction.prox loglinear, or loss.form reinforce",
        ),
        (
            fix.prox == "loglinear" and not off_policy,
            "correction.prox loglinear needs staleness.max_age > 0: without age it is the sampler",
        ),
        (
            fix.prox == "loglinear" and not weighted,
            "correction.prox loglinear without a correction.weight forgets the ratio of π_prox to μ: "
            "set correction.weight tis",
        ),
        (
            loss.form == "reinforce" and off_policy and not weighted,
            "loss.form reinforce is biased on samples of an older policy: set correction.weight tis",
        ),
        (
            loss.form == "reinforce" and fix.prox == "loglinear",
            "loss.form reinforce has no clip to centre: set correction.prox sampler",
        ),
        (
            by_token and loss.form in ("gspo", "gmpo", "topr", "vespo"),
            f"loss.form {loss.form} wants one advantage per sequence, and loss.distill_form advantage makes "
            "one per token: use gspo_token or grpo",
        ),
        (
            loss.advantage == "passk" and not 1 <= loss.k <= cfg.sampler.samples,
            f"loss.k must lie in 1..sampler.samples ({cfg.sampler.samples}), got {loss.k}",
        ),
        (
            loss.advantage == "shrunk"
            and not (cfg.reward.judge and cfg.judge.votes > 1 and cfg.judge.vote == "mean"),
            "loss.advantage shrunk goes by how far a judge's votes are apart: set reward.judge, judge.vote "
            "mean and judge.votes >= 2, or take grpo",
        ),
        (
            fix.reject in ("token", "sequence", "geometric") and None in (fix.keep_low, fix.keep_high),
            f"correction.reject {fix.reject} needs correction.keep_low and correction.keep_high",
        ),
        (
            fix.reject == "k3" and fix.keep_high is None,
            "correction.reject k3 needs correction.keep_high, in nats",
        ),
        (
            fix.reject == "none" and (fix.keep_low, fix.keep_high) != (None, None),
            "correction.keep_low and keep_high have no effect with correction.reject none",
        ),
        (
            not weighted and (fix.low, fix.high) != (None, None),
            "correction.low and high have no effect with correction.weight none",
        ),
        (fix.normalise and not weighted, "correction.normalise has no effect with correction.weight none"),
        (
            fix.weight == "icepop" and fix.level != "token",
            "correction.weight icepop works token by token: set correction.level token, or weight mis",
        ),
        (
            by_token and loss.distill_kind != "reverse",
            "loss.distill_form advantage is the sampled reverse KL: loss.distill_kind has no effect there",
        ),
        (
            cfg.uses_reference and loss.kl_form == "k3_weighted" and not off_policy,
            "loss.kl_form k3_weighted reweights by π/μ, which is 1 with staleness.max_age 0: use k2",
        ),
    ]


def _stream_rules(cfg: Config) -> list[tuple[bool, str]]:
    """More, of losses that look at the whole step: rl/terms.py."""
    loss = cfg.loss
    # without rewards, a teacher in the advantage and the policy term count the same samples
    apart = loss.distill_form == "divergence" or cfg.uses_reward
    counted = {"policy": loss.policy != 0, "kl": cfg.uses_reference, "distill": cfg.uses_teachers and apart}
    terms = [f"loss.{name}" for name, active in counted.items() if active]
    return [
        (
            cfg.trainer.stream and len(terms) > 1,
            f"trainer.stream: {' and '.join(terms)} are means over samples of their own, whose numbers are "
            "known too late: leave one of them, or set trainer.stream False",
        ),
        (
            cfg.trainer.stream and cfg.staleness.pick != "",
            "trainer.stream trains groups before a batch is there for staleness.pick to choose: set one of "
            "them",
        ),
    ]


def _teacher_rules(cfg: Config) -> list[tuple[bool, str]]:
    owners: dict[str, str] = {}
    mix, loss = cfg.loss.distill_mix, cfg.loss
    rules = [
        (
            mix in ("arithmetic", "geometric") and loss.distill_top_k > 0,
            f"loss.distill_mix {mix} mixes whole distributions, and with distill_top_k each teacher sends "
            "another part of its own: set distill_top_k 0, or distill_mix sum",
        ),
        (
            cfg.uses_teachers and 0 < cfg.teacher_replicas < len(cfg.teachers),
            f"teacher_replicas ({cfg.teacher_replicas}) must give each of {len(cfg.teachers)} teachers one",
        ),
        (
            "mixture" in cfg.teachers,
            "teachers.mixture: the mixture of loss.distill_mix goes by that name, rename the teacher",
        ),
        (cfg.teacher_replicas < 0, f"teacher_replicas must be >= 0, got {cfg.teacher_replicas}"),
    ]
    for name, teacher in cfg.teachers.items():
        rules.append((teacher.weight <= 0, f"teachers.{name}.weight must be > 0, got {teacher.weight}"))
        rules.append((teacher.replicas < 1, f"teachers.{name}.replicas must be >= 1"))
        if mix != "routed":
            continue
        rules.append((not teacher.keys, f"teachers.{name}.keys is empty: it would never be asked"))
        for key in teacher.keys:
            rules.append((key in owners, f"key {key!r} has two teachers, {owners.get(key)} and {name}"))
            owners[key] = name
    return rules
