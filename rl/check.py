"""What a config must satisfy before anything starts: plain rules, each with what to do about it."""

from __future__ import annotations

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
        (
            loss.policy == 0 and loss.distill == 0,
            "nothing to learn from: loss.policy and loss.distill are both 0",
        ),
        (
            loss.policy != 0 and not cfg.uses_reward and not (cfg.uses_teachers and sampled_only),
            "loss.policy needs an advantage: set reward.judge, reward.rule or reward.fn, or distil with "
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
        (
            cfg.uses_judge and not cfg.judge.lo < cfg.judge.hi,
            f"judge.lo must be below judge.hi, got {cfg.judge.lo} and {cfg.judge.hi}",
        ),
        (
            cfg.uses_judge and "{candidate}" not in cfg.judge.template,
            "judge.template must contain {candidate}",
        ),
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
        (cfg.data.held_out < 0, f"data.held_out must be >= 0, got {cfg.data.held_out}"),
        *_loss_rules(cfg),
        *_teacher_rules(cfg),
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


def _teacher_rules(cfg: Config) -> list[tuple[bool, str]]:
    owners: dict[str, str] = {}
    rules = []
    for name, teacher in cfg.teachers.items():
        rules.append((not teacher.keys, f"teachers.{name}.keys is empty: it would never be asked"))
        for key in teacher.keys:
            rules.append((key in owners, f"key {key!r} has two teachers, {owners.get(key)} and {name}"))
            owners[key] = name
    return rules
