# SPDX-License-Identifier: Apache-2.0
"""Captured queries, keys and values against what the layers of the same model compute without a capture."""

from pathlib import Path

import pytest
import torch

from tests.helpers.full_disk import full_disk
from vllm_sparse_backend.calibration import capture as module
from vllm_sparse_backend.calibration.capture import Capture, LayerTensors, capture_prompts
from vllm_sparse_backend.calibration.judge import dense_attention
from vllm_sparse_backend.config.errors import ConfigurationError

transformers = pytest.importorskip("transformers", reason="capturing needs transformers, which comes with vLLM")


def capture(model: Path, token_ids: list[int], folder: Path) -> Capture:
    (captured,) = capture_prompts(model, [token_ids], folder, torch.device("cpu"), torch.float32)
    return captured


def attention_outputs(folder, token_ids: list[int]) -> list[torch.Tensor]:
    """Return the input of each layer's output projection: [num_tokens, num_heads * head_dim]."""
    network = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    outputs: list[torch.Tensor] = []
    for layer in network.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0][0]))
    with torch.inference_mode():
        network(torch.tensor([token_ids]))
    return outputs


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_dense_attention_over_a_capture_is_the_layers_own(llama, prompt, tmp_path, num_kv_heads):
    folder = llama(num_key_value_heads=num_kv_heads)
    captured = capture(folder, prompt, tmp_path)
    assert captured.num_tokens == len(prompt)
    assert captured.scales == dict.fromkeys(range(3), pytest.approx(32**-0.5))
    for layer, expected in enumerate(attention_outputs(folder, prompt)):
        tensors = captured.read(layer)
        assert [tuple(x.shape) for x in tensors] == [(333, 4, 32), (333, num_kv_heads, 32), (333, num_kv_heads, 32)]
        got = dense_attention(tensors, captured.scales[layer])
        torch.testing.assert_close(got.flatten(1), expected, rtol=1e-4, atol=1e-5)


def test_layers_that_never_go_sparse_are_left_out(llama, tmp_path):
    windows = {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    model = llama(family="Qwen2", use_sliding_window=True, **windows)
    long, within_window = capture_prompts(
        model, [list(range(90)), list(range(40))], tmp_path, torch.device("cpu"), torch.float32
    )
    assert list(long.scales) == [1]
    assert list(within_window.scales) == [0, 1]


def test_a_model_whose_attention_is_not_plain_is_refused(llama, tmp_path):
    """A model is refused even if only some layers are of this kind, because later layers would get other hidden
    states."""
    model = llama("sinks", family="GptOss", num_local_experts=2, pad_token_id=0)
    said = f"{model.name}: given layers with learnt sinks, expected layers without"
    with pytest.raises(ConfigurationError, match=said):
        capture(model, list(range(40)), tmp_path)


def test_a_full_disk_is_an_error(tmp_path):
    tensors = LayerTensors(*(torch.zeros(100, 2, 32) for _ in range(3)))
    with full_disk(4096), pytest.raises(ConfigurationError, match=r"layer-0\.pt: cannot be written: ."):
        Capture(tmp_path, 100).add(0, tensors, 1.0)


def test_a_model_that_is_not_whole_is_an_error(llama, prompt, tmp_path):
    """Weights are missing entirely or in part, or the tokenizer is missing or broken."""
    model = llama()
    (weights,) = model.glob("*.safetensors")
    for damage in (lambda: weights.write_bytes(weights.read_bytes()[:100]), weights.unlink):
        damage()
        with pytest.raises(ConfigurationError, match=r"its weights cannot be read: ."):
            capture(model, prompt, tmp_path)
    for broken in (None, "{", "[]"):
        if broken is not None:
            (model / "tokenizer.json").write_text(broken)
        with pytest.raises(ConfigurationError, match=r"its tokenizer cannot be read: ."):
            module.load_tokenizer(model)


def test_nothing_is_fetched_and_no_prompt_is_longer_than_the_model(llama):
    for model, tokens, problem in (
        (Path("meta-llama/Llama-3.1-8B"), 100, "expected a model folder"),
        (llama(), 10_000_000, "--tokens: given 10000000, expected at most"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            module.prompt_tokens(model, tokens)
