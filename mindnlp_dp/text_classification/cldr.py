"""This module makes a language identification data set from CLDR's phrases in Babel, without a download.

The splits are the same on every machine with the same version of Babel.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.text_classification.examples import Examples

# The languages use many scripts; some are closely related (Danish and Norwegian; Russian, Ukrainian and Bulgarian).
LANGUAGES = ("ar bg cs da de el en es fa fi fr he hi hu it ja ko nb nl pl pt ro ru sv th tr uk vi zh").split()
HELD_OUT_PERCENT = 10


def cldr_phrases() -> tuple[Examples, Examples]:
    """Return a training and a held-out split of short phrases, labeled with their language.

    The phrases are CLDR's names of territories, languages, scripts, currencies and cities in 29
    languages, from Babel (https://cldr.unicode.org). A phrase that occurs in several languages is
    left out. A hash of the phrase decides its split.
    """
    try:
        from babel import Locale
    except ImportError:
        raise InputError(
            'the quickstart\'s data comes with Babel; pip install "mindnlp-dp[quickstart]", or pass --train-file '
            "and --test-file"
        ) from None
    languages_of: defaultdict[str, set[str]] = defaultdict(set)
    for language in LANGUAGES:
        for phrase in _names(Locale(language)):
            languages_of[phrase].add(language)
    splits = {True: Examples([], []), False: Examples([], [])}
    for phrase in sorted(languages_of):
        if len(languages_of[phrase]) == 1:
            split = splits[_hash(phrase) % 100 < HELD_OUT_PERCENT]
            split.texts.append(phrase)
            split.labels.extend(languages_of[phrase])
    return splits[False], splits[True]


def _names(locale: object) -> Iterator[str]:
    for kind in ("territories", "languages", "scripts", "currencies"):
        yield from getattr(locale, kind).values()
    for zone in locale.time_zones.values():  # type: ignore[attr-defined]
        if "city" in zone:
            yield zone["city"]


def _hash(phrase: str) -> int:
    return int.from_bytes(hashlib.blake2b(phrase.encode(), digest_size=8).digest(), "big")
