"""Prompts of a wanted length, in words that every tokenizer has."""

import random
from typing import Final

SAMPLE_WORDS: Final = 200
"""Words of the small request that tells how many tokens a word is."""

_WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story"),
    *("fact", "month", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head"),
    *("house", "service"),
)


def words(count: int, rng: random.Random) -> str:
    """That many common words in an order that nobody has cached."""
    return " ".join(rng.choices(_WORDS, k=count))


def words_for(tokens: int, counted: int | None) -> int:
    """Words that make about `tokens` tokens, when the sample's words and frame made `counted`; None is not known."""
    return max(1, round(tokens * SAMPLE_WORDS / (counted or SAMPLE_WORDS)))
