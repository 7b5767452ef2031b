"""verl's legacy reward groups (reward_model, custom_reward_function, sandbox_fusion) → our configuration.

TABLE says what becomes of every key; the functions below only apply it. Pure: mappings in, mappings out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, prod
from typing import Any, Literal

from rl.config import ConfigError

Kind = Literal["text", "count", "positive", "number", "switch", "arguments"]


class MigrationError(ConfigError):
    """A legacy configuration that has no faithful counterpart; every line names a key and what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    old: str  # verl's key; one without a counterpart also speaks for the keys below it
    new: str | None  # ours; None: there is none
    kind: Kind = "text"
    note: str = ""  # printed with the mapping; without a counterpart, what to do instead
    same: tuple[Any, ...] = ()  # without a counterpart: values that ask for what is so here anyway


_DELETE = "delete it: "
_FUNCTION = "there are no manager classes: the function is the reward, reward.fn path/to/file.py:name"
_ARGUMENTS = "arguments of the function are reward.fn_kwargs; a penalty on length goes into reward.fn"
_PER_SAMPLE = ("naive", "prime", "remote", "rate_limited", "dapo")  # dapo's penalty is in reward_kwargs
_SERVED = _DELETE + "the judge is served by an engine, not by a training worker"
_SAMPLED = _DELETE + "judges sample from the whole distribution, at judge.temperature"
_ONE_GPU = "a judge replica has one GPU: use 1, and judge.replicas for more"
_NO_CODE = _DELETE + "code from a model's folder is not run"

TABLE: tuple[Row, ...] = (
    Row("custom_reward_function.path", "reward.fn", note="with .name, or compute_score"),
    Row("custom_reward_function.name", "reward.fn"),
    Row("custom_reward_function.reward_kwargs", "reward.fn_kwargs", "arguments"),
    Row("reward_model.num_workers", "reward.fn_workers", "count"),
    Row("reward_model.max_concurrent", "reward.fn_workers", "count", "in total, not per worker as in verl"),
    Row("reward_model.timeout", "reward.fn_deadline", "positive", "seconds of one call"),
    Row("reward_model.max_rpm", "reward.rate", "positive", "calls per minute, in total"),
    Row("reward_model.enable", "reward.judge", "switch", "weight of the judge's score, beside reward.fn's"),
    Row("reward_model.model.path", "judge.model"),
    Row("reward_model.n_gpus_per_node", "judge.replicas", "count", "times nnodes, one GPU each"),
    Row("reward_model.nnodes", "judge.replicas", "count", "times n_gpus_per_node, one GPU each"),
    Row("reward_model.rollout.response_length", "judge.max_tokens", "count"),
    Row("reward_model.rollout.max_num_seqs", "judge.slots", "count"),
    Row("reward_model.rollout.temperature", "judge.temperature", "number"),
    Row("sandbox_fusion.url", "reward.sandbox_url"),
    Row("sandbox_fusion.max_concurrent", "reward.sandbox_concurrency", "count"),
    Row("sandbox_fusion.memory_limit_mb", "reward.sandbox_memory_mb", "count"),
    # older files have this group one level down
    Row("reward_model.sandbox_fusion.url", "reward.sandbox_url"),
    Row("reward_model.sandbox_fusion.max_concurrent", "reward.sandbox_concurrency", "count"),
    Row("reward_model.sandbox_fusion.memory_limit_mb", "reward.sandbox_memory_mb", "count"),
    # no counterpart
    Row("reward_model.reward_manager", None, note=_FUNCTION, same=_PER_SAMPLE),
    Row("reward_model.reward_loop_source", None, note=_FUNCTION, same=("register",)),
    Row("reward_model.reward_loop_module_path", None, note=_FUNCTION),
    Row("reward_model.reward_loop_class_name", None, note=_FUNCTION),
    Row("reward_model.reward_kwargs", None, note=_ARGUMENTS),
    Row("reward_model.overlong_buffer", None, note=_ARGUMENTS),
    Row("reward_model.use_reward_loop", None, note=_DELETE + "there is one reward path", same=(True,)),
    Row("reward_model.launch_reward_fn_async", None, note=_DELETE + "it is always so", same=(True,)),
    Row("reward_model.max_tpm", None, note="limit calls by reward.rate, their length by judge.max_tokens"),
    Row("reward_model.estimated_tokens_per_request", None, note=_DELETE + "it belongs to max_tpm"),
    Row("reward_model.enable_resource_pool", None, note=_DELETE + "judges have their own", same=(True,)),
    Row("reward_model.model", None, note=_DELETE + "only .path has one, judge.model"),
    Row("reward_model.model.trust_remote_code", None, note=_NO_CODE, same=(False,)),
    Row("reward_model.model.external_lib", None, note=_NO_CODE),
    Row("reward_model.model.input_tokenizer", None, note=_DELETE + "the judge reads text"),
    Row("reward_model.inference", None, note="an older name: rename the group to reward_model.rollout"),
    Row("reward_model.rollout", None, note=_DELETE + "the judge's engine has its own defaults"),
    Row("reward_model.rollout.tensor_model_parallel_size", None, note=_ONE_GPU, same=(1,)),
    Row("reward_model.rollout.pipeline_model_parallel_size", None, note=_ONE_GPU, same=(1,)),
    Row("reward_model.rollout.data_parallel_size", None, note=_ONE_GPU, same=(1,)),
    Row("reward_model.rollout.expert_parallel_size", None, note=_ONE_GPU, same=(1,)),
    Row("reward_model.rollout.top_p", None, note=_SAMPLED, same=(1,)),
    Row("reward_model.rollout.top_k", None, note=_SAMPLED, same=(-1, 0)),
    Row("reward_model.rollout.do_sample", None, note=_SAMPLED + ", 0 is greedy", same=(True,)),
    Row("reward_model.strategy", None, note=_SERVED),
    Row("reward_model.micro_batch_size", None, note=_SERVED),
    Row("reward_model.micro_batch_size_per_gpu", None, note=_SERVED),
    Row("reward_model.use_dynamic_bsz", None, note=_SERVED),
    Row("reward_model.forward_max_token_len_per_gpu", None, note=_SERVED),
    Row("reward_model.profiler", None, note=_SERVED),
    Row("reward_model.max_length", None, note=_DELETE + "a judge's context limit is its model's"),
)

GROUPS = ("reward_model", "custom_reward_function", "sandbox_fusion")
UNSET = (None, "???")  # null, and OmegaConf's mark of a value still to come

_ROWS = {row.old: row for row in TABLE}
_WHOLE = {row.old for row in TABLE if row.kind == "arguments"}
_KINDS: Mapping[Kind, tuple[str, Callable[[Any], bool]]] = {
    "text": ("text without ${...}", lambda v: isinstance(v, str) and v != "" and "${" not in v),
    "count": ("a whole number >= 1", lambda v: type(v) is int and v >= 1),
    "positive": ("a number > 0", lambda v: type(v) in (int, float) and 0 < v < inf),
    "number": ("a number >= 0", lambda v: type(v) in (int, float) and 0 <= v < inf),
    "switch": ("true or false", lambda v: type(v) is bool),
    "arguments": ("a mapping of arguments", lambda v: isinstance(v, Mapping)),
}


def migrate(legacy: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(config with the legacy keys merged in field by field, report with a line per legacy key, in order).

    legacy: verl's groups, nested as in the YAML file. config: ours, nested, and only what the user set: a
    field found there is never overwritten. None means not set, on both sides. A field that has the wanted
    value already is no conflict, so migrating again changes nothing; what changes nothing reports nothing.

    Raises MigrationError with all faults, one a line: values of a wrong type, keys without a counterpart or
    unknown to verl; and when there are none of those, legacy keys that contradict each other or the config.
    """
    if dotted := [key for key in config if "." in key]:
        raise ValueError(f"migrate: config must be nested, got the dotted keys {dotted}: split them")
    given = dict(_leaves({group: legacy.get(group) for group in GROUPS}))
    strangers = [group for group, value in legacy.items() if group not in GROUPS and value not in UNSET]
    wrong = [f"{group} is no legacy reward group: set ours for it, and take it out" for group in strangers]
    _refuse([*wrong, *(_fault(old, value) for old, value in given.items())])

    result, faults, lines = _copy(config), [], {}
    for new, values in _by_target(given).items():
        try:
            value = _combine(new, values)
            if value is not None:
                _set(result, new, value, values)
        except MigrationError as error:
            faults.append(str(error))
        else:
            lines |= {old: _line(old, given[old], new, value) for old in values}
    _refuse(faults)
    settled = {old: f"{old} = {value!r} → nothing to set, it is so here" for old, value in given.items()}
    return result, () if result == config else tuple((settled | lines).values())


def _leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what is set. An argument of the user's function is one value, also a mapping."""
    for key, value in node.items():
        path = f"{above}.{key}" if above else key
        if isinstance(value, Mapping) and above not in _WHOLE:
            yield from _leaves(value, path)
        elif value not in UNSET:
            yield path, value


def _row(old: str) -> Row | None:
    """The key's own row, or that of the nearest group above it that speaks for its keys."""
    names = old.split(".")
    for n in range(len(names), 0, -1):
        row = _ROWS.get(".".join(names[:n]))
        if row is not None and (n == len(names) or row.new is None or row.old in _WHOLE):
            return row
    return None


def _fault(old: str, value: Any) -> str | None:
    row = _row(old)
    if row is None or row.new is None:
        if row is not None and row.old == old and value in row.same:
            return None
        why = "is unknown" if row is None else f"has no counterpart: {row.note}"
        return f"{old} = {value!r} {why}{_nearest(old)}"
    if row.old != old:
        name = old.removeprefix(row.old + ".")
        return None if name.isidentifier() else f"{row.old}: {name!r} is no name of an argument"
    expected, fits = _KINDS[row.kind]
    return None if fits(value) else f"{old}: expected {expected}, got {value!r}"


def _nearest(old: str) -> str:
    above, _, name = old.rpartition(".")
    beside = [key.rpartition(".")[2] for key in _ROWS if key.rpartition(".")[0] == above]
    close = [] if old in _ROWS else get_close_matches(name, beside, n=1, cutoff=0.75)
    return f" (did you mean {above}.{close[0]}?)" if close else ""


def _refuse(faults: Iterable[str | None]) -> None:
    if said := [fault for fault in faults if fault]:
        raise MigrationError("\n".join(said))


def _copy(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(v) if isinstance(v, Mapping) else deepcopy(v) for key, v in node.items()}


def _by_target(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Our key → verl's keys that give it, with their values. A switch becomes a weight, 1 or 0."""
    targets: dict[str, dict[str, Any]] = {}
    for old, value in given.items():
        row = _row(old)
        if row is not None and row.new is not None:
            new = row.new + old.removeprefix(row.old)  # an argument keeps its name
            exact = row.kind not in ("positive", "number", "switch")
            targets.setdefault(new, {})[old] = deepcopy(value) if exact else float(value)
    return targets


def _combine(new: str, values: Mapping[str, Any]) -> Any:
    """The one value that verl's keys give ours, or None if they leave it unset."""
    if new == "reward.fn":
        path = values.get("custom_reward_function.path")
        name = values.get("custom_reward_function.name", "compute_score")
        if path is None and name != "compute_score":
            named = f"custom_reward_function.name = {name!r} has no .path"
            raise MigrationError(f"{named}: set .path, or reward.fn path/to/file.py:{name}")
        return None if path is None else f"{path}:{name}"
    if new == "judge.replicas":
        if len(values) == 1:
            alone = f"{[*values][0]} alone gives no number of judges"
            raise MigrationError(f"{alone}: set n_gpus_per_node and nnodes, or judge.replicas")
        return prod(values.values())
    (first, value), *others = values.items()
    for old, other in others:
        if other != value:
            raise MigrationError(f"{first} = {value!r} and {old} = {other!r} both give {new}: keep one")
    return value


def _set(config: dict[str, Any], new: str, value: Any, sources: Iterable[str]) -> None:
    """Writes a field that is not set. Raises MigrationError if it is set to something else."""
    *sections, name = new.split(".")
    node = config
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise MigrationError(f"{new}: {section} must be a section, got {node!r}")
    if node.get(name) is None:
        node[name] = value
    elif node[name] != value:
        meant = f"{' with '.join(sources)} means {new} = {value!r}"
        raise MigrationError(f"{meant}, but {new} is set to {node[name]!r}: keep one of them")


def _line(old: str, value: Any, new: str, given: Any) -> str:
    row = _row(old)
    note = f" ({row.note})" if row is not None and row.note else ""
    field = "nothing to set, there is no .path" if given is None else f"{new} = {given!r}"
    return f"{old} = {value!r} → {field}{note}"
