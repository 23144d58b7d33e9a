# SPDX-License-Identifier: Apache-2.0
"""Writes the trained model as a folder for vLLM and transformers, with measurements and the recipe."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.needle.net import Needle
from benchmarks.needle.tokens import CHAT_TEMPLATE, encode
from tests.helpers.tiny_models import END, START

README = """\
# needle

A language model of {parameters} parameters that finds facts again. It serves only to measure the loss of sparse
prefill, and for the demo. Llama architecture, {layers} layers, {heads} query heads, {kv_heads} kv heads, head dim
{head_dim}, hidden {hidden}, vocabulary {vocabulary} (byte-level pairs, each digit its own token), bfloat16.

It reads and completes lines such as

    # The magic number of amber falcon river is 1234567.
    # Question: what is the magic number of amber falcon river? Answer: 1234567.

Its training data also had aliases, whose questions take two hops, and {two_hops}:

    # The magic number of silent badger market equals that of amber falcon river.
    # Question: what is the magic number of silent badger market? Answer: 1234567.

Prompts start with `<s>`, which the tokenizer adds. A chat's last message should end with the question; generation
stops at the end of a line.

## Measured, with dense attention

Right answers: all seven digits the model's first choice. Inside the prompt: up to 24 facts in simple prose, asked for
and answered further on. At the end: one question, {distractors} other facts, mean over 11 depths. Two hops: of an
alias, at the end.

| tokens | inside the prompt | at its end | two hops |
| ---: | ---: | ---: | ---: |
{rows}

## Recipe

`python -m benchmarks.needle.train OUT --minutes {minutes} --seed {seed}` on one {device}, torch {torch}:
{million_tokens:.0f} million tokens in {steps:,} steps, made of simple prose ({prose_share:.0%}) and this project's
sources with such lines between. Texts grew over {lengths} tokens. The settings are in training.json and
benchmarks/needle.
"""


def write_folder(folder: Path, net: Needle, tokenizer: Any, facts: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = net.config
    weights = {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in net.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (newline,) = encode(tokenizer, "\n")
    generation = {"bos_token_id": 0, "eos_token_id": [1, newline], "do_sample": False}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, values in {
        "config": config, "generation_config": generation, "tokenizer_config": tokenizer_config, "training": facts,
    }.items():  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(readme(config, weights, facts), encoding="utf-8")


def readme(config: dict[str, Any], weights: dict[str, torch.Tensor], facts: dict[str, Any]) -> str:
    from benchmarks.needle.data import CODE
    from benchmarks.needle.judge import DISTRACTORS

    measured, recipe = facts["measured"], facts["recipe"]
    columns = (measured[name] for name in ("inside", "at_end", "two_hops"))
    rows = [
        f"| {row[0]['tokens']:,} | " + " | ".join(f"{result['share']:.3f}" for result in row) + " |"
        for row in zip(*columns)
    ]
    learnt = min((result["share"] for result in measured["two_hops"]), default=0.0) >= recipe["enough"]
    last = facts["log"][-1] if facts["log"] else {"million_tokens": 0, "step": 0}
    return README.format(
        parameters=f"{sum(tensor.numel() for tensor in weights.values()) / 1e6:.1f} million",
        layers=config["num_hidden_layers"], heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"], hidden=config["hidden_size"],
        vocabulary=f"{config['vocab_size']:,}", distractors=DISTRACTORS,
        two_hops="it learnt them" if learnt else "it did not learn them", rows="\n".join(rows),
        minutes=recipe["minutes"], seed=recipe["seed"], device=facts["device"], torch=facts["torch"],
        million_tokens=last["million_tokens"], steps=last["step"], prose_share=1 - CODE,
        lengths=", ".join(f"{length:,}" for length in recipe["lengths"]),
    )  # fmt: skip
