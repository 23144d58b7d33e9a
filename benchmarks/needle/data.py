# SPDX-License-Identifier: Apache-2.0
"""Training texts, composed on the training device: lines of facts and questions spread over a text, as in `eval`.

Every fact and every alias is asked for at least once later in the text, so a text of 8,192 tokens teaches up to a
hundred answers.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.needle.tokens import (
    ALIAS,
    DIGITS,
    FACT,
    NAME_WORDS,
    QUESTION,
    RESTATED,
    STYLES,
    VALUE,
    VOCAB_SIZE,
    Lines,
    encode,
)
from vllm_sparse_backend.evaluation.prompt_texts import project_text, prose

OTHER_STYLES = 0.25  # share of lines in other styles than the tool's
OTHER_NAMES = 0.15  # share of texts whose names consist of any words
FAR = 0.25  # share of facts near a text's beginning with questions near its end
AT_END = 0.5  # share of texts that end with a question
CODE = 0.2  # share of texts that are code

TEXT, ANSWER, ANSWER_OF_TWO, UNKNOWABLE = 0, 1, 2, 3
"""Kinds of tokens: of the text or a line, digit of an answer, digit of an alias's answer, digit of a new value."""


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor  # [batch, tokens]
    kinds: torch.Tensor  # [batch, tokens]: TEXT, ANSWER, ...


class Composer:
    def __init__(self, tokenizer: Any, device: torch.device | str, seed: int) -> None:
        self.lines = Lines.of(tokenizer, device)
        self.device = device
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        corpora = [prose(1_000_000, seed + 1), project_text()]
        # Line by line, because the tokenizer is slow on long texts.
        ids = [[i for line in corpus.splitlines(True) for i in encode(tokenizer, line)] for corpus in corpora]
        self.corpora = [torch.tensor(corpus, device=device) for corpus in ids]

    def compose(self, batch: int, tokens: int, aliases: bool) -> Batch:
        num_facts, num_aliases, num_again = self._counts(tokens, aliases)
        values, other_of = self._values(batch, num_facts, num_aliases)
        facts, kinds, places = self._places(batch, num_facts, num_aliases, num_again, other_of)
        styles = self._draw(batch, facts.shape[1], high=len(STYLES) - 1) + 1
        styles *= self._uniform(batch, facts.shape[1]) < OTHER_STYLES
        rows = styles * 3 + torch.where(kinds == RESTATED, FACT, kinds)
        lengths = self.lines.lengths[rows]
        room = tokens - 1 - lengths.sum(1, keepdim=True)
        if (least_room := int(room.min())) < 0:
            expected = f"at least {tokens - least_room:,}, because its lines take {tokens - 1 - least_room:,}"
            raise ValueError(f"a text: given {tokens:,} tokens, expected {expected}")
        cuts = (places * (room + 1)).long().minimum(room)
        # Stable, so that a fact precedes its question at the same place.
        cuts, order = cuts.sort(dim=1, stable=True)
        rows, lengths, facts, kinds = (tensor.gather(1, order) for tensor in (rows, lengths, facts, kinds))

        item_ids = self.lines.tokens[rows]
        slots = (item_ids - VOCAB_SIZE).clamp(min=0)
        known = values[torch.arange(batch, device=self.device)[:, None], facts]
        item_ids = torch.where(item_ids >= VOCAB_SIZE, known.gather(2, slots), item_ids)
        answer = torch.where(facts < num_facts, ANSWER, ANSWER_OF_TWO)
        in_value = torch.where(kinds >= QUESTION, answer, UNKNOWABLE)
        item_kinds = torch.where(self.lines.tokens[rows] >= VOCAB_SIZE + VALUE, in_value[..., None], TEXT)
        return self._lay_out(batch, tokens, cuts, lengths, item_ids, item_kinds)

    def _lay_out(
        self, batch: int, tokens: int, cuts: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor, kinds: torch.Tensor
    ) -> Batch:
        """Lay out items in order: ``cuts`` and ``lengths`` [batch, items], ``ids`` and ``kinds`` [batch, items,
        longest]."""
        before = lengths.cumsum(1)
        starts = 1 + cuts + before - lengths
        at = torch.arange(tokens, device=self.device).expand(batch, -1).contiguous()
        item = torch.searchsorted(starts, at, right=True) - 1
        first = item.clamp(min=0)
        inside = at - starts.gather(1, first)
        is_line = (item >= 0) & (inside < lengths.gather(1, first))
        taken = torch.where(item >= 0, before.gather(1, first), 0)
        text = self._text(batch, tokens, at - 1 - taken)
        flat = first * ids.shape[2] + inside.clamp(0, ids.shape[2] - 1)
        ids = torch.where(is_line, ids.flatten(1).gather(1, flat), text)
        kinds = torch.where(is_line, kinds.flatten(1).gather(1, flat), TEXT)
        ids[:, 0] = 0  # the token that starts every prompt
        return Batch(ids, kinds)

    def _text(self, batch: int, tokens: int, at: torch.Tensor) -> torch.Tensor:
        proses, code = (
            corpus[self._draw(batch, 1, high=len(corpus) - tokens) + at.clamp(min=0)] for corpus in self.corpora
        )
        return torch.where(self._uniform(batch, 1) < CODE, code, proses)

    def _counts(self, tokens: int, aliases: bool) -> tuple[int, int, int]:
        """Return the numbers of facts, aliases and restated facts: as many as fit, or down to an eighth of that.

        Short texts are full of them, so that the model learns early.
        """
        fact, alias, question = self.lines.longest
        per_fact = fact + question + (aliases * (alias + question) + fact) / 3
        most = max(1.0, 0.95 * (tokens - 1) / per_fact)
        facts = max(1, int(most * (8 if tokens > 512 else 1.5) ** -self.rng.random()))
        return facts, facts // 3 if aliases else 0, max(1, facts // 3)

    def _values(self, batch: int, num_facts: int, num_aliases: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of each fact and alias [batch, facts + aliases, slots], and each alias's fact."""
        count = num_facts + num_aliases
        # Names sometimes differ in only one word of three, because they are made of few words.
        side = self.rng.randint(min(16, math.ceil((2 * count) ** (1 / 3))), 16)
        which = self._uniform(batch, side**3).argsort(1)[:, :count]
        words = self.lines.names[:, None].expand(-1, batch, -1)
        any_words = self.lines.words[self._draw(NAME_WORDS * batch, 16, high=len(self.lines.words))]
        others = (self._uniform(1, batch, 1) < OTHER_NAMES).expand(NAME_WORDS, -1, 16)
        words = torch.where(others, any_words.view(NAME_WORDS, batch, 16), words)
        words = words.gather(2, self._uniform(NAME_WORDS, batch, 16).argsort(2))
        parts = (which // side**2, which // side % side, which % side)
        names = torch.stack([words[i].gather(1, part) for i, part in enumerate(parts)], 2)

        digits = self._draw(batch * num_facts, DIGITS, high=10).view(batch, num_facts, DIGITS)
        digits[..., 0] = digits[..., 0].clamp(min=1)
        numbers = self.lines.digits[digits]
        other_of = self._draw(batch, num_aliases, high=num_facts)
        source = torch.cat([torch.arange(num_facts, device=self.device).expand(batch, -1), other_of], 1)
        rows = torch.arange(batch, device=self.device)[:, None]
        return torch.cat([names, names[rows, source], numbers[rows, source]], 2), other_of

    def _places(
        self, batch: int, num_facts: int, num_aliases: int, num_again: int, other_of: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return for each line [batch, lines]: its fact or alias, its kind, and its place from 0 to 1."""
        pairs = self._uniform(2, batch, num_facts)
        stated, questioned = pairs.amin(0), pairs.amax(0)
        far = self._uniform(batch, num_facts) < FAR
        stated, questioned = torch.where(far, stated * 0.1, stated), torch.where(far, 1 - 0.1 * questioned, questioned)
        stated, questioned = torch.minimum(stated, questioned), torch.maximum(stated, questioned)
        at_end = self._uniform(batch) < AT_END
        questioned[:, 0] = torch.where(at_end, 1.0, questioned[:, 0])
        aliased = self._uniform(batch, num_aliases)
        known = torch.maximum(aliased, stated.gather(1, other_of))
        aliased_asked = known + (1 - known) * self._uniform(batch, num_aliases)
        again = stated[:, :num_again]
        again = again + (1 - again) * self._uniform(batch, num_again)
        places = torch.cat([stated, aliased, questioned, aliased_asked, again], 1)
        fact_numbers, alias_numbers = list(range(num_facts)), list(range(num_facts, num_facts + num_aliases))
        facts = torch.tensor(
            fact_numbers + alias_numbers + fact_numbers + alias_numbers + fact_numbers[:num_again], device=self.device
        )
        kinds = torch.tensor(
            [FACT] * num_facts
            + [ALIAS] * num_aliases
            + [QUESTION] * (num_facts + num_aliases)
            + [RESTATED] * num_again,
            device=self.device,
        )
        return facts.expand(batch, -1), kinds.expand(batch, -1), places

    def _uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _draw(self, *shape: int, high: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)
