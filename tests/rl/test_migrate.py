import ast
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rl.migrate
from rl.config import ConfigError
from rl.migrate import TABLE, MigrationError, migrate

# verl's key → a valid value: every key with a counterpart, arguments aside
VALID = {
    "custom_reward_function.path": "grade.py",
    "custom_reward_function.name": "grade",
    "custom_reward_function.reward_kwargs.strict": True,
    "custom_reward_function.reward_kwargs.levels": {"low": 1, "high": None},
    "reward_model.num_workers": 8,
    "reward_model.max_concurrent": 8,
    "reward_model.timeout": 30,
    "reward_model.max_rpm": 600,
    "reward_model.enable": True,
    "reward_model.model.path": "some/judge",
    "reward_model.n_gpus_per_node": 4,
    "reward_model.nnodes": 2,
    "reward_model.rollout.response_length": 4096,
    "reward_model.rollout.max_num_seqs": 64,
    "reward_model.rollout.temperature": 0.7,
    "sandbox_fusion.url": "http://box:8080/run",
    "sandbox_fusion.max_concurrent": 32,
    "sandbox_fusion.memory_limit_mb": 512,
    "reward_model.sandbox_fusion.url": "http://box:8080/run",
    "reward_model.sandbox_fusion.max_concurrent": 32,
    "reward_model.sandbox_fusion.memory_limit_mb": 512,
}
MEANT = {
    "reward": {
        "fn": "grade.py:grade", "fn_kwargs": {"strict": True, "levels": {"low": 1, "high": None}},
        "fn_workers": 8, "fn_deadline": 30.0, "rate": 600.0, "judge": 1.0,
        "sandbox_url": "http://box:8080/run", "sandbox_concurrency": 32, "sandbox_memory_mb": 512,
    },
    "judge": {"model": "some/judge", "replicas": 8, "max_tokens": 4096, "slots": 64, "temperature": 0.7},
}  # fmt: skip
NEEDS = {
    "custom_reward_function.name": "custom_reward_function.path",
    "reward_model.n_gpus_per_node": "reward_model.nnodes",
    "reward_model.nnodes": "reward_model.n_gpus_per_node",
}


def nest(flat):
    tree = {}
    for path, value in flat.items():
        *above, name = path.split(".")
        node = tree
        for section in above:
            node = node.setdefault(section, {})
        node[name] = deepcopy(value)
    return tree


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict) and key != "levels":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def refused(legacy, config, *patterns):
    with pytest.raises(ConfigError) as error:
        migrate(legacy, config)
    assert isinstance(error.value, MigrationError)
    for pattern in patterns:
        assert pattern in str(error.value)
    return str(error.value)


def test_a_complete_example():
    legacy = {
        "reward_model": {
            "enable": True, "enable_resource_pool": True, "n_gpus_per_node": 2, "nnodes": 1,
            "reward_manager": "rate_limited", "reward_loop_source": "register",
            "num_workers": None, "max_concurrent": 16, "max_rpm": 1000, "timeout": 60.0,
            "model": {"path": "Qwen/Qwen2.5-3B-Instruct", "trust_remote_code": False, "external_lib": None},
            "rollout": {
                "name": "???", "tensor_model_parallel_size": 1, "engine_kwargs": {},
                "response_length": 4096, "max_num_seqs": 256, "temperature": 0.7,
            },
        },
        "custom_reward_function": {"path": "my/grade.py", "name": None, "reward_kwargs": {"strict": False}},
        "sandbox_fusion": {"url": "http://box:8080/run", "max_concurrent": None, "memory_limit_mb": None},
    }  # fmt: skip
    config, report = migrate(legacy, {"trainer": {"steps": 10}, "reward": {"rule": 0.5}})
    assert config == {
        "trainer": {"steps": 10},
        "reward": {
            "rule": 0.5, "judge": 1.0, "sandbox_url": "http://box:8080/run",
            "fn": "my/grade.py:compute_score", "fn_kwargs": {"strict": False},
            "fn_workers": 16, "fn_deadline": 60.0, "rate": 1000.0,
        },
        "judge": {
            "model": "Qwen/Qwen2.5-3B-Instruct", "replicas": 2, "max_tokens": 4096, "slots": 256,
            "temperature": 0.7,
        },
    }  # fmt: skip
    assert report == (
        "reward_model.enable = True → reward.judge = 1.0 (weight of the judge's score, beside reward.fn's)",
        "reward_model.enable_resource_pool = True → nothing to set, it is so here",
        "reward_model.n_gpus_per_node = 2 → judge.replicas = 2 (times nnodes, one GPU each)",
        "reward_model.nnodes = 1 → judge.replicas = 2 (times n_gpus_per_node, one GPU each)",
        "reward_model.reward_manager = 'rate_limited' → nothing to set, it is so here",
        "reward_model.reward_loop_source = 'register' → nothing to set, it is so here",
        "reward_model.max_concurrent = 16 → reward.fn_workers = 16 (in total, not per worker as in verl)",
        "reward_model.max_rpm = 1000 → reward.rate = 1000.0 (calls per minute, in total)",
        "reward_model.timeout = 60.0 → reward.fn_deadline = 60.0 (seconds of one call)",
        "reward_model.model.path = 'Qwen/Qwen2.5-3B-Instruct' → judge.model = 'Qwen/Qwen2.5-3B-Instruct'",
        "reward_model.model.trust_remote_code = False → nothing to set, it is so here",
        "reward_model.rollout.tensor_model_parallel_size = 1 → nothing to set, it is so here",
        "reward_model.rollout.response_length = 4096 → judge.max_tokens = 4096",
        "reward_model.rollout.max_num_seqs = 256 → judge.slots = 256",
        "reward_model.rollout.temperature = 0.7 → judge.temperature = 0.7",
        "custom_reward_function.path = 'my/grade.py' → reward.fn = 'my/grade.py:compute_score' "
        "(with .name, or compute_score)",
        "custom_reward_function.reward_kwargs.strict = False → reward.fn_kwargs.strict = False",
        "sandbox_fusion.url = 'http://box:8080/run' → reward.sandbox_url = 'http://box:8080/run'",
    )


def test_failure_1_a_path_alone_keeps_the_default_name():
    config, _ = migrate({"custom_reward_function": {"path": "a.py", "name": None}}, {})
    assert config == {"reward": {"fn": "a.py:compute_score"}}


def test_failure_2_a_sandbox_url_alone_leaves_its_limits_at_their_defaults():
    url = {"url": "http://box", "max_concurrent": None, "memory_limit_mb": None}
    assert migrate({"sandbox_fusion": url}, {})[0] == {"reward": {"sandbox_url": "http://box"}}


def test_failure_3_a_manager_class_is_refused_and_never_becomes_the_naive_one():
    fields = {"source": "importlib", "module_path": "m.py", "class_name": "Manager"}
    legacy = nest({f"reward_model.reward_loop_{name}": value for name, value in fields.items()})
    said = refused(legacy, {}, *(f"reward_model.reward_loop_{name} = " for name in fields))
    assert said.count("reward.fn path/to/file.py:name") == 3


def test_failure_4_rate_limits_and_model_settings_do_not_vanish():
    limits = {"max_rpm": 90, "max_concurrent": 4, "timeout": 20}
    assert migrate({"reward_model": limits}, {})[0] == {
        "reward": {"rate": 90.0, "fn_workers": 4, "fn_deadline": 20.0}
    }
    refused({"reward_model": {"max_tpm": 5000}}, {}, "reward_model.max_tpm = 5000", "reward.rate")
    model = {"trust_remote_code": True, "external_lib": "x"}
    refused({"reward_model": {"model": model}}, {}, "trust_remote_code = True", "external_lib = 'x'")


@pytest.mark.parametrize("old", sorted(VALID))
def test_failure_5_a_legacy_key_never_wins_over_an_explicit_one(old):
    legacy = nest({old: VALID[old]} | ({NEEDS[old]: VALID[NEEDS[old]]} if old in NEEDS else {}))
    (new, _), *_ = flat(migrate(legacy, {})[0])
    explicit = nest({new: "set by hand"})
    refused(legacy, explicit, old, f"{new} is set to 'set by hand'")
    assert explicit == nest({new: "set by hand"})


def test_failure_6_a_second_migration_changes_nothing_and_reports_nothing():
    legacy = {"custom_reward_function": {"path": "a.py"}, "reward_model": {"reward_manager": "naive"}}
    config, report = migrate(legacy, {})
    assert len(report) == 2
    assert migrate(legacy, config) == (config, ())
    assert migrate({}, config) == (config, ())


def test_failure_7_a_name_alone_names_no_file():
    refused(
        {"custom_reward_function": {"path": None, "name": "grade"}}, {"reward": {"fn": "mine.py:f"}},
        "custom_reward_function.name = 'grade'", "reward.fn path/to/file.py:grade",
    )  # fmt: skip
    default = {"custom_reward_function": {"path": None, "name": "compute_score"}}
    mine = {"reward": {"fn": "mine.py:f"}}
    assert migrate(default, mine) == (mine, ())


@st.composite
def legacies(draw):
    chosen = draw(st.dictionaries(st.sampled_from(sorted(VALID)), st.booleans()))
    chosen |= {NEEDS[old]: True for old, is_set in chosen.items() if is_set and old in NEEDS}
    return {old: VALID[old] if is_set else None for old, is_set in chosen.items()}


@settings(max_examples=150, deadline=None)
@given(legacies(), st.sets(st.sampled_from(sorted(VALID))))
def test_migration_is_pure_idempotent_field_by_field_and_blind_to_nulls(chosen, nulls):
    legacy, mine = nest(chosen), {"trainer": {"steps": 3}, "reward": {"rule": 0.25, "fn": None}}
    before = deepcopy((legacy, mine))
    config, report = migrate(legacy, mine)

    assert migrate(legacy, config) == (config, ())
    assert migrate({}, config) == (config, ())
    assert (legacy, mine) == before
    assert migrate(nest(chosen | {old: None for old in nulls - set(chosen)}), mine) == (config, report)
    assert {line.split(" = ")[0] for line in report} == {k for k, v in chosen.items() if v is not None}

    meant = dict(flat(MEANT))
    if chosen.get("custom_reward_function.name") is None:
        meant["reward.fn"] = "grade.py:compute_score"
    added = {k: v for k, v in flat(config) if v is not None and k not in ("trainer.steps", "reward.rule")}
    assert added == {k: meant[k] for k in added}
    assert set(added) == {line.split(" → ")[1].split(" = ")[0] for line in report}
    assert config["trainer"] == {"steps": 3} and config["reward"]["rule"] == 0.25


def test_everything_together_and_the_result_shares_nothing_with_its_arguments():
    legacy, mine = nest(VALID), {"sampler": {"stop": [1]}}
    config, _ = migrate(legacy, mine)
    assert config == MEANT | {"sampler": {"stop": [1]}}
    config["reward"]["fn_kwargs"]["levels"]["low"] = 9
    config["sampler"]["stop"].append(2)
    assert legacy == nest(VALID) and mine == {"sampler": {"stop": [1]}}


@pytest.mark.parametrize("row", [r for r in TABLE if r.new is None], ids=lambda r: r.old)
def test_a_key_without_a_counterpart_is_an_error_that_says_what_to_do(row):
    said = refused(nest({row.old: "anything"}), {}, f"{row.old} = 'anything' has no counterpart: {row.note}")
    assert row.note and len(said.splitlines()) == 1
    for value in row.same:
        config, report = migrate(nest({row.old: value, "sandbox_fusion.url": "http://box"}), {})
        assert config == {"reward": {"sandbox_url": "http://box"}}
        assert f"{row.old} = {value!r} → nothing to set, it is so here" in report


def test_every_key_with_a_counterpart_is_tested_here():
    tested = {old.split(".reward_kwargs.")[0] for old in VALID}
    assert {r.old.removesuffix(".reward_kwargs") for r in TABLE if r.new is not None} == tested
    assert len({r.old for r in TABLE}) == len(TABLE)


def test_every_key_of_verls_own_legacy_file_is_in_the_table():
    keys = {
        "custom_reward_function": "path name",
        "sandbox_fusion": "url max_concurrent memory_limit_mb",
        "reward_model": "num_workers reward_manager enable enable_resource_pool n_gpus_per_node nnodes "
        "reward_loop_source reward_loop_module_path reward_loop_class_name",
        "reward_model.rollout": "name dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes "
        "free_cache_engine data_parallel_size expert_parallel_size tensor_model_parallel_size load_format "
        "max_num_batched_tokens max_model_len max_num_seqs engine_kwargs limit_images enable_chunked_prefill "
        "enable_prefix_caching disable_log_stats skip_tokenizer_init prompt_length response_length",
    }
    wrong = object()
    paths = [f"{group}.{name}" for group, names in keys.items() for name in names.split()]
    said = refused(nest(dict.fromkeys(paths, wrong)), {})
    assert [path for path in paths if path not in said] == [] and "is unknown" not in said


def test_unknown_keys_are_named_with_the_nearest_known_one_all_at_once():
    legacy = {
        "reward_model": {"max_rmp": 3, "rollout": {"respons_length": 9, "dtype": "bfloat16"}},
        "custom_reward_function": {"file": "a.py"},
        "data": {"train_files": "x"},
        "actor_rollout_ref": None,
    }
    said = refused(
        legacy, {},
        "reward_model.max_rmp = 3 is unknown (did you mean reward_model.max_rpm?)",
        "(did you mean reward_model.rollout.response_length?)",
        "reward_model.rollout.dtype = 'bfloat16' has no counterpart",
        "custom_reward_function.file = 'a.py' is unknown",
        "data is no legacy reward group",
    )  # fmt: skip
    assert len(said.splitlines()) == 5


@pytest.mark.parametrize(
    ("old", "value", "expected"),
    [
        ("reward_model.num_workers", "8", "a whole number >= 1"),
        ("reward_model.num_workers", True, "a whole number >= 1"),
        ("reward_model.nnodes", 0, "a whole number >= 1"),
        ("reward_model.timeout", 0, "a number > 0"),
        ("reward_model.max_rpm", float("nan"), "a number > 0"),
        ("reward_model.rollout.temperature", -0.1, "a number >= 0"),
        ("reward_model.enable", "true", "true or false"),
        ("reward_model.model.path", "${actor_rollout_ref.model.path}", "text without ${...}"),
        ("custom_reward_function.path", "", "text without ${...}"),
        ("custom_reward_function.reward_kwargs", 3, "a mapping of arguments"),
    ],
)
def test_values_of_a_wrong_kind_are_refused(old, value, expected):
    refused(nest({old: value}), {}, f"{old}: expected {expected}, got {value!r}")


def test_legacy_keys_that_contradict_each_other_are_refused_by_name():
    refused(
        {"reward_model": {"num_workers": 8, "max_concurrent": 16}}, {},
        "reward_model.num_workers = 8", "reward_model.max_concurrent = 16", "reward.fn_workers",
    )  # fmt: skip
    refused(
        {"sandbox_fusion": {"url": "http://a"}, "reward_model": {"sandbox_fusion": {"url": "http://b"}}}, {},
        "sandbox_fusion.url = 'http://a'", "reward_model.sandbox_fusion.url = 'http://b'",
    )  # fmt: skip


@pytest.mark.parametrize("half", ["n_gpus_per_node", "nnodes"])
def test_half_of_a_product_is_no_number_of_judges(half):
    refused({"reward_model": {half: 1}}, {}, f"reward_model.{half} alone", "judge.replicas")


def test_an_explicit_value_that_agrees_is_no_conflict():
    legacy = {"reward_model": {"timeout": 30, "num_workers": 2}}
    config, report = migrate(legacy, {"reward": {"fn_deadline": 30.0}})
    assert config == {"reward": {"fn_deadline": 30.0, "fn_workers": 2}} and len(report) == 2


def test_arguments_merge_one_by_one_and_a_null_one_is_left_to_the_function():
    legacy = {"custom_reward_function": {"reward_kwargs": {"a": 1, "b": None, "c": {}}}}
    config, _ = migrate(legacy, {"reward": {"fn_kwargs": {"b": 5}}})
    assert config == {"reward": {"fn_kwargs": {"a": 1, "b": 5, "c": {}}}}
    assert migrate(legacy, {"reward": {"fn_kwargs": None}})[0] == {"reward": {"fn_kwargs": {"a": 1, "c": {}}}}
    refused(legacy, {"reward": {"fn_kwargs": {"a": 2}}}, "reward_kwargs.a", "reward.fn_kwargs.a is set to 2")
    refused({"custom_reward_function": {"reward_kwargs": {"a.b": 1}}}, {}, "'a.b' is no name of an argument")


def test_a_judge_that_is_switched_off_is_written_as_weight_zero():
    assert migrate({"reward_model": {"enable": False}}, {})[0] == {"reward": {"judge": 0.0}}


def test_a_config_that_is_not_nested_is_refused():
    with pytest.raises(ValueError, match=r"dotted keys \['reward.fn'\]"):
        migrate({}, {"reward.fn": "a.py:f"})
    refused({"reward_model": {"timeout": 3}}, {"reward": 1}, "reward.fn_deadline: reward must be a section")


def test_the_migration_needs_nothing_but_the_standard_library():
    tree = ast.parse(Path(rl.migrate.__file__).read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    stdlib = {"__future__", "collections.abc", "copy", "dataclasses", "difflib", "math", "typing"}
    assert imported <= stdlib | {"rl.config"}
