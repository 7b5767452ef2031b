import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from models.config import ModelConfig
from models.parallelise import parallelise
from models.tokenizer import char_tokenizer, load_tokenizer
from models.transformer import Transformer
from models.weights import clean_state, load_folder, save_folder

TIED = ModelConfig(vocab_size=12, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12)
UNTIED = replace(TIED, tie_embeddings=False, family="qwen2", qkv_bias=True)


def build(cfg: ModelConfig) -> Transformer:
    model = Transformer(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("cfg", [TIED, UNTIED])
def test_a_folder_gives_back_config_and_weights(tmp_path, cfg):
    model = build(cfg)
    save_folder(tmp_path, model, cfg, char_tokenizer("0123456789"))
    loaded_cfg, state = load_folder(tmp_path)
    assert loaded_cfg == cfg
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())
    assert load_tokenizer(tmp_path).vocab_size == cfg.vocab_size


def test_shards_with_an_index_are_read(tmp_path):
    model = build(UNTIED)
    save_folder(tmp_path, model, UNTIED)
    names = list(model.state_dict())
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: p for n, p in model.state_dict().items() if where[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "model.safetensors").unlink()
    _, state = load_folder(tmp_path)
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())


@pytest.mark.parametrize("limit", [1, 500, 1000, 10**6])
def test_shards_hold_at_most_their_limit_and_give_back_the_weights(tmp_path, limit):
    model = build(UNTIED)
    save_folder(tmp_path, model, UNTIED, shard_bytes=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    shards = [list(load_file(file).values()) for file in files]
    assert all(len(shard) == 1 or sum(t.nbytes for t in shard) <= limit for shard in shards)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1) == (limit < 10**6)
    if index.exists():
        said = json.loads(index.read_text())
        assert said["metadata"]["total_size"] == sum(p.nbytes for p in model.state_dict().values())
        assert list(said["weight_map"]) == list(model.state_dict())
    _, state = load_folder(tmp_path)
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())


def test_saving_over_a_folder_leaves_no_weights_of_before(tmp_path):
    save_folder(tmp_path, build(UNTIED), UNTIED, shard_bytes=500)
    _, before = load_folder(tmp_path)
    save_folder(tmp_path, {name: t + 1 for name, t in before.items()}, UNTIED)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    _, after = load_folder(tmp_path)
    assert all(torch.equal(after[name], before[name] + 1) for name in after)


def test_a_folder_without_its_files_is_refused_by_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no model folder: it has no config.json"):
        load_folder(tmp_path)
    save_folder(tmp_path, build(UNTIED), UNTIED, shard_bytes=500)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {gone.name}"):
        load_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match="no model.safetensors; only safetensors"):
        load_folder(tmp_path)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:5], lambda b: b"version https://git-lfs"])
def test_a_damaged_file_of_weights_is_named(tmp_path, damage):
    save_folder(tmp_path, build(TIED), TIED)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_folder(tmp_path)


def test_a_folder_of_quite_another_model_is_refused_in_one_line(tmp_path):
    save_folder(tmp_path, build(UNTIED), UNTIED)
    break_file(tmp_path, lambda s: [s.update({f"other.{name}": s.pop(name)}) for name in list(s)])
    with pytest.raises(ValueError, match="and 49 more") as caught:
        load_folder(tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("said, eos", [(7, (7,)), ([8, 7], (8, 7)), (None, (1,))])
def test_what_ends_a_text_is_what_the_generation_config_says(tmp_path, said, eos):
    cfg = replace(TIED, eos_ids=(1,))
    save_folder(tmp_path, build(cfg), cfg)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert load_folder(tmp_path)[0] == replace(cfg, eos_ids=eos)


def test_wrapper_prefixes_are_never_exported(tmp_path):
    model = build(TIED)
    wrapped = {
        name.replace("layers.0.", "layers.0._orig_mod._fsdp_wrapped_module."): p
        for name, p in model.state_dict().items()
    }
    save_folder(tmp_path, wrapped, TIED)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def nested(model, wrap):
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = wrap(block)
    return torch.compile(model)


WRAPS = {
    "compiled": lambda model, mesh: torch.compile(model),
    "blocks compiled within": lambda model, mesh: nested(model, torch.compile),
    "recomputed, compiled": lambda model, mesh: nested(model, lambda b: torch.compile(checkpoint_wrapper(b))),
    "compiled in place": lambda model, mesh: model.compile() or model,
    "sharded": lambda model, mesh: parallelise(model, mesh, compile=True),
    "sharded, compiled": lambda model, mesh: torch.compile(parallelise(model, mesh, compile=True)),
    "sharded, blocks compiled": lambda model, mesh: nested(
        parallelise(model, mesh, compile=False), torch.compile
    ),
}


@pytest.mark.parametrize("cfg", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("how", WRAPS)
def test_o070_weights_of_a_wrapped_model_have_plain_names_and_load_strictly_both_ways(
    tmp_path, one_rank, cfg, how
):
    plain, wrapped = build(cfg), WRAPS[how](build(cfg), one_rank)
    with torch.no_grad():
        for p in wrapped.parameters():
            p.add_(1.0)
    save_folder(tmp_path, wrapped, cfg)
    assert load_file(tmp_path / "model.safetensors").keys() == plain.state_dict().keys()
    _, state = load_folder(tmp_path)
    before = {name: p.clone() for name, p in plain.state_dict().items()}
    plain.load_state_dict(state, strict=True)
    assert all(torch.equal(p, before[name] + 1.0) for name, p in plain.state_dict().items())
    # A copy: it renames the keys of what it is given.
    set_model_state_dict(wrapped, dict(before), options=StateDictOptions(full_state_dict=True))
    after = clean_state(wrapped.state_dict())
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("how", WRAPS)
def test_o070_a_checkpoint_fits_any_wrapping_and_a_missing_tensor_is_an_error(tmp_path, one_rank, how):
    wrapped, sharded = WRAPS[how](build(UNTIED), one_rank), WRAPS["sharded"](build(UNTIED), one_rank)
    expected = {name: p + 1.0 for name, p in clean_state(wrapped.state_dict()).items()}
    set_model_state_dict(wrapped, dict(expected), options=StateDictOptions(full_state_dict=True))
    state = get_model_state_dict(wrapped)
    assert state.keys() == expected.keys()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "whole")
    into = get_model_state_dict(sharded)
    dcp.load({"model": into}, checkpoint_id=tmp_path / "whole")
    set_model_state_dict(sharded, into)
    assert all(torch.equal(p, expected[name]) for name, p in clean_state(sharded.state_dict()).items())
    state.pop("model.norm.weight")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "part")
    with pytest.raises(CheckpointException, match="Missing key.*model.norm.weight"):
        dcp.load({"model": get_model_state_dict(sharded)}, checkpoint_id=tmp_path / "part")


def test_o070_names_of_a_wrapper_that_is_not_known_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing model\.embed_tokens\.weight .*and 35 more"):
        save_folder(tmp_path, torch.nn.ModuleDict({"module": build(TIED)}), TIED)
    assert not list(tmp_path.iterdir())


def break_file(path, change):
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors")


@pytest.mark.parametrize(
    "change, names",
    [
        (lambda s: s.pop("model.norm.weight"), r"missing model\.norm\.weight"),
        (lambda s: s.update(extra=torch.zeros(1)), "unexpected extra"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(3)}),
            r"norm\.weight is \(3,\), expected \(8,\)",
        ),
        (lambda s: s.update({"lm_head.weight": torch.zeros(12, 8)}), "lm_head.weight differs"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path, change, names):
    save_folder(tmp_path, build(TIED), TIED)
    break_file(tmp_path, change)
    with pytest.raises(ValueError, match=names):
        load_folder(tmp_path)


def test_a_tied_head_that_was_written_out_is_accepted(tmp_path):
    save_folder(tmp_path, build(TIED), TIED)
    break_file(tmp_path, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load_folder(tmp_path)[1]


def test_an_untied_head_that_is_missing_is_named(tmp_path):
    save_folder(tmp_path, build(UNTIED), UNTIED)
    break_file(tmp_path, lambda s: s.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        load_folder(tmp_path)


def test_save_refuses_weights_of_another_model(tmp_path):
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        save_folder(tmp_path, build(TIED), replace(TIED, tie_embeddings=False))
