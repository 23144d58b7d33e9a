# SPDX-License-Identifier: Apache-2.0
"""The part of a prompt that the text of its answer depends on.

A token's text depends on the tokens before it, for example at the end of a character of several tokens. vLLM therefore
gives its detokenizer the prompt, which is decoded as a whole with the first token of the answer: on the thread that
serves all requests, and before the token is sent. The last tokens of the prompt suffice.

An answer's text differs only after a prompt that ends with more than 64 tokens of bytes that are no text: vLLM repeats
the end of the prompt in the answer.
"""

from copy import copy
from typing import Any

END_TOKENS = 64
"""Last tokens of a prompt that are decoded. A character has far fewer."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of an incomplete character decode to."""


def with_end_of_prompt(request: Any, tokenizer: Any) -> Any:
    """Return a request with the end of its prompt only.

    A prompt whose end is no text, such as special tokens, or whose last character is incomplete stays whole.
    """
    token_ids = request.prompt_token_ids
    if token_ids is None or len(token_ids) <= END_TOKENS:
        return request
    end = token_ids[-END_TOKENS:]
    # This tokenizer will decode the answer. vLLM's wrappers around it take a lock, and may clean up the text.
    text = tokenizer._tokenizer.decode(end, skip_special_tokens=request.sampling_params.skip_special_tokens)
    if not text or text.endswith(INCOMPLETE):
        return request
    shortened = copy(request)
    shortened.prompt_token_ids = end
    return shortened
