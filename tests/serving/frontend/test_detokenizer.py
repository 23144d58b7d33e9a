# SPDX-License-Identifier: Apache-2.0
"""The text of an answer is the same whether its detokenizer gets the whole prompt or only the end."""

import random
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from vllm_sparse_backend.serving import hooks
from vllm_sparse_backend.serving.frontend.detokenizer import END_TOKENS, INCOMPLETE, with_end_of_prompt

SPECIAL = "<|end|>"
TEXT = "The größte 漢字, naïve 🙂🙃 👩‍👩‍👧 don't  two  spaces.\n\n\tdef f(x): return x ** 2  # 한국어 Ελληνικά\n" * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """Words with leading spaces, and bytes for unknown characters, as Llama 2 has them."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + sorted(
        {*"▁abcdefghijklmnopqrstuvwxyz.,'", "▁t", "▁two", "re"}
    )
    merges = [("▁", "t"), ("r", "e")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    return tokenizer


KINDS = {"byte_level": byte_level, "sentence_pieces": sentence_pieces, "word_pieces": word_pieces}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    tokenizer = KINDS[request.param]()
    tokenizer.add_special_tokens([SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def request_of(token_ids: list[int] | None, skip: bool = True) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="0", prompt_token_ids=token_ids, mm_features=None,
        sampling_params=SamplingParams(skip_special_tokens=skip), pooling_params=None, arrival_time=0.0,
        lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip


def texts_of(detokenizer: FastIncrementalDetokenizer, answer: Sequence[int]) -> Iterator[str]:
    for token in answer:
        detokenizer.update([token], stop_terminated=False)
        yield detokenizer.get_next_output_text(finished=False, delta=True)


@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_has_the_same_text(tokenizer: PreTrainedTokenizerFast, skip: bool) -> None:
    rng = random.Random(0)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    num_shortened = 0
    for _ in range(300):
        begin = rng.randrange(200)
        prompt = token_ids[begin : begin + rng.randrange(1, 4 * END_TOKENS)]
        for _ in range(rng.randrange(4)):
            prompt.insert(rng.randrange(len(prompt) + 1), special)
        answer = rng.choices([*token_ids, special], k=4) + token_ids[:8]
        request = request_of(prompt, skip)
        shortened = with_end_of_prompt(request, tokenizer)
        num_shortened += shortened is not request
        whole, end = (FastIncrementalDetokenizer(tokenizer, x) for x in (request, shortened))
        assert list(texts_of(whole, answer)) == list(texts_of(end, answer)), (prompt, answer)
        assert request.prompt_token_ids == prompt
    assert num_shortened > 100


def test_prompts_without_text_at_their_end_stay_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    words = tokenizer.encode("two", add_special_tokens=False)
    request = request_of(words + [special] * 2 * END_TOKENS)
    assert with_end_of_prompt(request, tokenizer) is request
    for prompt in (None, words):
        request = request_of(prompt)
        assert with_end_of_prompt(request, tokenizer) is request


def test_a_prompt_that_ends_within_a_character_stays_whole() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    bytes_of_smile = tokenizer.encode("a🦖", add_special_tokens=False)
    assert tokenizer.decode(bytes_of_smile[:-1]).endswith(INCOMPLETE)
    prompt = tokenizer.encode(TEXT, add_special_tokens=False) + bytes_of_smile[:-1]
    request = request_of(prompt)
    assert with_end_of_prompt(request, tokenizer) is request


def test_the_hook_gives_the_detokenizer_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    given = []

    class Detokenizer:
        def __init__(self, tokenizer: object, request: EngineCoreRequest) -> None:
            given.append(request.prompt_token_ids)

    hooks.put_around(Detokenizer, "__init__", hooks.shorten_prompts)
    prompt = tokenizer.encode(TEXT, add_special_tokens=False)
    Detokenizer(tokenizer, request_of(prompt))
    assert given == [prompt[-END_TOKENS:]]
