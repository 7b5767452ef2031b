from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from models import delta as module
from models.checksum import add_checksums, checksums, piece_checksums
from models.config import ModelConfig
from models.delta import Delta, apply, diff, digest, patch
from models.shards import Piece, fuse, pieces, unfuse
from models.transformer import Transformer
from models.weights import as_array

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64]
BF16_NAN = (0x7FC0, 0x7FC1, -0x40)  # quiet, another payload, negative


def noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits: NaN, infinities and denormal numbers among them."""
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def mixed(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """x with a share p of its elements drawn again."""
    return torch.where(
        torch.rand(x.shape, generator=generator) < p, noise(tuple(x.shape), x.dtype, generator), x
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits."""
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=3),
    p=st.sampled_from([0.0, 0.002, 0.03, 0.2, 0.95, 1.0]),
    dtype=st.sampled_from(DTYPES),
    chunk=st.sampled_from([16, 1 << 24]),
    seed=st.integers(0, 10**6),
)
def test_any_state_becomes_any_other_to_the_bit(
    shapes: list[list[int]], p: float, dtype: torch.dtype, chunk: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    old = {str(i): noise(tuple(shape), dtype, g) for i, shape in enumerate(shapes)}
    new = {name: mixed(x, p, g) for name, x in old.items()}
    state = {name: x.clone() for name, x in old.items()}
    delta = diff(old, new, 3, 4)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(module, "CHUNK", chunk)
        assert apply(state, Delta.of(delta.header, delta.arrays)) == checksums(new)
    assert all(same(state[name], new[name]) for name in new)
    assert delta.names == [name for name in new if not same(old[name], new[name])]
    assert delta.nbytes <= sum(new[name].nbytes for name in delta.names)


@settings(max_examples=25, deadline=None)
@given(changed=st.sets(st.integers(0, 130_000), max_size=20), near=st.sampled_from([0, 255, 65535]))
def test_gaps_of_any_length_are_kept(changed: set[int], near: int) -> None:
    """Few changes far apart, some by just one filler's length."""
    old = torch.zeros(200_000, dtype=torch.bfloat16)
    places = sorted(
        changed | {place + near + i for place in changed for i in (-1, 0, 1) if place + near + i >= 0}
    )
    new = old.index_fill(0, torch.tensor(places, dtype=torch.int64), 1.0)
    state = {"x": old.clone()}
    apply(state, diff({"x": old}, {"x": new}, 0, 1))
    assert same(state["x"], new)


def test_what_compares_equal_but_has_other_bits_is_sent_and_nan_that_stayed_is_not() -> None:
    old, new = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16)
    old[:3] = torch.tensor(BF16_NAN, dtype=torch.int16).view(torch.bfloat16)
    new[:3] = torch.tensor(BF16_NAN, dtype=torch.int16).view(torch.bfloat16)
    new[1:2] = new[2:3]
    new[500], new[999] = -0.0, math.inf
    delta = diff({"x": old}, {"x": new}, 0, 1)
    assert delta.arrays["bits/x"].tolist() == [BF16_NAN[2], -(2**15), 0x7F80]
    state = {"x": old.clone()}
    apply(state, delta)
    assert same(state["x"], new)


@pytest.mark.parametrize(
    ("p", "form", "bf16", "fp32"),
    [
        (0.002, "gaps uint16", 0.004, 0.003),
        (0.01, "gaps uint8", 0.0154, 0.0127),
        (0.05, "gaps uint8", 0.075, 0.0625),
        (0.3, "mask uint8", 0.3625, 0.33125),
        (0.99, "whole", 1.0, 1.0),
    ],
)
def test_the_form_of_fewest_bytes_is_taken(p: float, form: str, bf16: float, fp32: float) -> None:
    for dtype, share in ((torch.bfloat16, bf16), (torch.float32, fp32)):
        old = torch.zeros(200_000, dtype=dtype)
        places = torch.randperm(len(old), generator=torch.Generator().manual_seed(0))
        new = old.index_fill(0, places[: round(p * len(old))], 1.0)
        delta = diff({"x": old, "y": old}, {"x": new, "y": old.clone()}, 0, 1)
        forms = [f"{key.split('/')[0]} {x.dtype}" for key, x in delta.arrays.items() if key != "bits/x"]
        assert (forms or ["whole"]) == [form]
        assert delta.nbytes / old.nbytes == pytest.approx(share, rel=0.01)


TINY = ModelConfig(
    vocab_size=70, d_model=16, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=4, d_ff=24, dtype="bfloat16",
    family="qwen2", qkv_bias=True, tie_embeddings=False,
)  # fmt: skip


def versions(n: int, p: float = 0.05) -> list[dict[str, Tensor]]:
    """A model's weights, and what n - 1 updates made of them."""
    g = torch.Generator().manual_seed(0)
    shapes = {name: tuple(x.shape) for name, x in Transformer(TINY, device="meta").state_dict().items()}
    states = [{name: noise(shape, torch.bfloat16, g) for name, shape in shapes.items()}]
    while len(states) < n:
        states.append({name: mixed(x, p, g) for name, x in states[-1].items()})
    return states


def copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in state.items()}


def test_a_chain_of_deltas_is_followed_by_checksums_that_are_added_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = versions(4)
    deltas = [diff(states[v], states[v + 1], v, v + 1) for v in range(3)]
    assert [d.before for d in deltas[1:]] == [d.after for d in deltas[:-1]]
    state, held = copy(states[0]), checksums(states[0])
    read: list[str] = []
    monkeypatch.setattr(module, "checksums", lambda part: read.extend(part) or checksums(part))
    for delta in deltas:
        held = apply(state, delta, held)
    assert held == checksums(states[3])
    assert read == [name for delta in deltas for name in delta.names]


@pytest.mark.parametrize("given", [False, True])
def test_a_receiver_of_another_base_is_left_as_it_was(given: bool) -> None:
    states = versions(3)
    delta = diff(states[1], states[2], 7, 8)
    for other in (states[0], states[1] | {"more": torch.zeros(1)}, dict(list(states[1].items())[1:])):
        state = copy(other)
        sums = checksums(state)
        says = rf"from version 7 \({delta.before}\) to 8; the receiver holds {digest(sums)}"
        with pytest.raises(ValueError, match=says):
            apply(state, delta, sums if given else None)
        assert checksums(state) == sums


@pytest.mark.parametrize("p", [0.02, 0.3, 1.0])
def test_one_damaged_bit_is_found(p: float) -> None:
    g = torch.Generator().manual_seed(0)
    old = {"x": noise((40, 30), torch.bfloat16, g)}
    delta = diff(old, {"x": mixed(old["x"], p, g)}, 0, 1)
    for key, array in delta.arrays.items():
        for place in (0, array.nbytes // 2, array.nbytes - 1):
            raw = np.frombuffer(array.tobytes(), np.uint8).copy()
            raw[place] ^= 1
            bad = Delta.of(delta.header, delta.arrays | {key: raw.view(array.dtype)})
            with pytest.raises(ValueError, match="the result is|the delta is damaged"):
                apply(copy(old), bad)


@pytest.mark.parametrize("p", [0.02, 0.3, 1.0])
def test_changes_beyond_the_tensor_s_end_are_refused(p: float) -> None:
    g = torch.Generator().manual_seed(0)
    old = noise((40, 30), torch.bfloat16, g)
    delta = diff({"x": old}, {"x": mixed(old, p, g)}, 0, 1)
    with pytest.raises(ValueError, match=r"x do not fit \(30, 30\)"):
        patch(old[:30].clone(), delta, "x")


@pytest.mark.parametrize("p", [0.0, 0.05, 0.3, 1.0])
def test_a_delta_travels_by_value_and_in_a_safetensors_file(tmp_path: Path, p: float) -> None:
    old, new = versions(2, p)
    delta = diff(old, new, 3, 4)
    save_file(delta.arrays, tmp_path / "delta.safetensors", metadata=delta.header)
    with safe_open(tmp_path / "delta.safetensors", framework="np") as file:
        read = Delta.of(file.metadata(), {key: file.get_tensor(key) for key in file.keys()})
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(delta, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer) for buffer in buffers]  # read-only, as Ray's object store hands them out
    for got in (read, pickle.loads(sent, buffers=frozen)):
        assert got.header == delta.header and sorted(got.arrays) == sorted(delta.arrays)
        state = copy(old)
        apply(state, got)
        assert all(same(state[name], new[name]) for name in new)


def test_arrays_as_they_travel_give_the_same_delta_as_tensors() -> None:
    old, new = versions(2)
    a = diff(old, new, 0, 1)
    old_arrays, new_arrays = ({name: as_array(x) for name, x in state.items()} for state in (old, new))
    b = diff(old_arrays, new_arrays, 0, 1)
    assert a.header == b.header and a.arrays.keys() == b.arrays.keys()
    assert all(np.array_equal(a.arrays[key], b.arrays[key]) for key in a.arrays)


def test_it_is_written_through_views_into_an_engine_s_fused_parameters() -> None:
    old, new = versions(2)
    parameters = {name: torch.nn.Parameter(x) for name, x in fuse(old).items()}
    shapes = {name: tuple(x.shape) for name, x in old.items()}
    apply(unfuse({name: p.data for name, p in parameters.items()}, shapes), diff(old, new, 0, 1))
    assert all(same(parameters[name].data, x) for name, x in fuse(new).items())


@pytest.mark.parametrize("p", [0.02, 0.3, 1.0])
def test_a_view_of_any_strides_is_written_and_nothing_beside_it(p: float) -> None:
    g = torch.Generator().manual_seed(0)
    old = noise((40, 30), torch.bfloat16, g)
    new = mixed(old, p, g)
    delta = diff({"x": old}, {"x": new}, 0, 1)
    wide, turned = torch.zeros(50, 64, dtype=torch.bfloat16), torch.zeros(30, 40, dtype=torch.bfloat16)
    for view in (wide[5:45, 7:37], turned.T):
        view.copy_(old)
        apply({"x": view}, delta)
        assert same(view, new)
    wide[5:45, 7:37] = 0
    assert not wide.any()


@pytest.mark.parametrize("p", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_ranks_that_hold_pieces_patch_their_own_and_their_shares_prove_it(size: int, p: float) -> None:
    old, new = versions(2, p)
    delta = diff(old, new, 0, 1)
    shares = []
    for rank in range(size):
        held = pieces(TINY, rank, size)
        state = {name: piece.of(old[name]).clone() for name, piece in held.items()}
        for name in delta.names:
            patch(state[name], delta, name, held[name])
        assert all(same(state[name], held[name].of(new[name])) for name in new)
        shares.append(piece_checksums(state, held))
    assert digest(add_checksums(shares)) == delta.after


def test_a_piece_may_be_cut_along_any_axis() -> None:
    g = torch.Generator().manual_seed(0)
    old = noise((6, 8, 10), torch.float32, g)
    new = mixed(old, 0.1, g)
    delta = diff({"x": old}, {"x": new}, 0, 1)
    for axis in range(3):
        piece = Piece(whole=(6, 8, 10), axis=axis, start=2, stop=5)
        view = piece.of(old).clone()
        patch(view, delta, "x", piece)
        assert same(view, piece.of(new))


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ({"y": torch.zeros(2)}, r"only one state has \['x', 'y'\]"),
        ({"x": torch.zeros(3)}, r"x was \(2,\) torch.float32, is \(3,\)"),
        ({"x": torch.zeros(2, dtype=torch.bfloat16)}, "is .* torch.bfloat16"),
    ],
)
def test_states_of_different_models_have_no_delta(new: dict[str, Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        diff({"x": torch.zeros(2)}, new, 0, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("p", [0.001, 0.05, 0.3, 1.0])
def test_deltas_are_made_and_applied_on_cuda_as_on_the_cpu(p: float) -> None:
    old, new = versions(2, p)
    g = torch.Generator().manual_seed(1)
    old["large"] = noise((1000, 1003), torch.bfloat16, g)
    new["large"] = mixed(old["large"], p, g)
    there = {name: x.cuda() for name, x in old.items()}
    delta = diff(there, {name: x.cuda() for name, x in new.items()}, 0, 1)
    here = diff(old, new, 0, 1)
    assert delta.header == here.header
    assert all(np.array_equal(delta.arrays[key], here.arrays[key]) for key in here.arrays)
    assert apply(there, delta) == checksums(new)
