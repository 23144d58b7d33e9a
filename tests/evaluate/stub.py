# SPDX-License-Identifier: Apache-2.0
"""What servers answer that evaluation asks: words for tokens, and log-probabilities of a prompt's."""

import re

FACT = re.compile(r"# The magic number of ([a-z ]+) is (\d{7})\.")
QUESTION = re.compile(r"# Question: what is the magic number of ([a-z ]+)\? Answer: (\d{7})\.")


class Words:
    """A tokenizer that is exact both ways; ``digits`` of a number make one token, with a space before it or without."""

    def __init__(self, digits: int = 1, spaced: bool = False) -> None:
        space = " ?" if spaced else ""
        self.split = re.compile(rf"{space}\d{{1,{digits}}}|[A-Za-z]+|\s|[^\w\s]|_")
        self.ids: dict[str, int] = {"<s>": 0}

    def __call__(self, text: str) -> list[int]:
        found = re.findall(r"<s>", text) if text == "<s>" else self.split.findall(text)
        assert "".join(found) == text
        return [self.ids.setdefault(token, len(self.ids)) for token in found]

    def decode(self, ids: list[int]) -> str:
        names = {i: token for token, i in self.ids.items()}
        return "".join(names[i] for i in ids)


def entry(token: int, logprob: float = -0.5, rank: int = 1) -> dict[str, dict[str, object]]:
    likeliest = {} if rank == 1 else {"9999": {"logprob": -0.1, "rank": 1, "decoded_token": "y"}}
    return likeliest | {str(token): {"logprob": logprob, "rank": rank, "decoded_token": "x"}}
