"""Text to ask about: random words, program files and what tools say. Fresh for each draw."""

from __future__ import annotations

import random
from collections.abc import Sequence

# Common words, one token each (with the space before it) in the vocabularies of the usual models.
WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were her all she there would their we him been has when who will more no if out
so said what up its about into than them can only other new some could time these two may then do
first any my now such like our over man me even most made after also did many before must through
back years where much your way well down should because each just those people how too little state
good very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used take
three
""".split()  # noqa: SIM905
NOUNS = "order invoice customer product payment shipment account ticket message report session".split()  # noqa: SIM905
VERBS = "load save check update count merge filter sort print parse".split()  # noqa: SIM905
LINE_TOKENS = 11  # of a program's line, about


def words(rng: random.Random, count: int) -> str:
    """`count` random words: about as many tokens."""
    return " ".join(rng.choices(WORDS, k=count))


def source_file(rng: random.Random, tokens: int) -> str:
    """A Python module of about so many tokens."""
    return program(rng, max(1, tokens // LINE_TOKENS))


def program(rng: random.Random, count: int, nouns: Sequence[str] = NOUNS) -> str:
    """`count` lines of Python, as programs have them: functions that are alike, but not the same."""
    lines: list[str] = []
    while len(lines) < count:
        noun, verb, limit = rng.choice(nouns), rng.choice(VERBS), rng.randint(2, 900)
        lines += [
            f"def {verb}_{noun}s({noun}s, limit={limit}):",
            f'    """{verb.capitalize()} up to `limit` of the {noun}s."""',
            "    result = []",
            f"    for index, {noun} in enumerate({noun}s):",
            f"        if index >= limit or not {noun}.is_valid():",
            f"            log.warning('{noun} %d was skipped', index)",
            "            continue",
            f"        result.append({noun}.{verb}())",
            "    return result",
            "",
            "",
        ]
    return "\n".join(lines[:count])
