"""Translation between two made-up languages: another word order, agreement, and a lexicon.

The source language has the order subject, verb, object; an adjective stands before its noun, and a
separate word after a noun makes it plural. The target language has the order verb, subject, object;
an adjective stands after its noun; number is in the form of the noun; a verb agrees with its
subject's number, an adjective with its noun's gender, which only the lexicon knows.

    source:  adjective₁ noun₁ PLURAL verb noun₂
    target:  BEGIN verb-pl noun₁-pl adjective₁-gender(noun₁) noun₂-sg END

A target word is chosen by one source word, its form by another one: to translate is to look at
several places at once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rank_collapse import struct
from rank_collapse.annotations import Leaf
from rank_collapse.training.tasks.sequences import NUM_MARKS, SequencePairs, between_marks

NOUNS, VERBS, ADJECTIVES = 12, 6, 6  # words of each kind
PLURAL = NUM_MARKS
FIRST_WORD = PLURAL + 1
# Token ids of the target language, which has more: two forms of each word, and the marks.
VOCAB_SIZE = FIRST_WORD + 2 * (NOUNS + VERBS + ADJECTIVES)
TARGET_LENGTH = 7  # the longest; with both marks


class Lexicon(struct.Struct):
    """Which word of the target language each word of the source language is."""

    # Permutations [words of the kind]: the target's word by the source's
    nouns: Leaf
    verbs: Leaf
    adjectives: Leaf
    genders: Leaf  # 0 or 1 of each noun of the source [nouns]


def make_lexicon(key: jax.Array) -> Lexicon:
    """Draws a lexicon; half of the nouns have gender 1."""
    *keys, key_genders = jax.random.split(key, 4)
    sizes = (NOUNS, VERBS, ADJECTIVES)
    words = (jax.random.permutation(k, n) for k, n in zip(keys, sizes, strict=True))
    return Lexicon(*words, genders=jax.random.permutation(key_genders, NOUNS) % 2)


def make_pairs(key: jax.Array, num_examples: int, lexicon: Lexicon) -> SequencePairs:
    """Draws sentences of the source language uniformly, with their translations.

    Token ids: the marks of `sequences`, `PLURAL`, then nouns, verbs and adjectives from
    `FIRST_WORD` on; in the target two forms of each, 2w and 2w + 1. Half of the nouns have an
    adjective, half are plural.

    Args:
        key: Random key of the draw.
        num_examples: Pairs of sentences.
        lexicon: Lexicon of the translation.
    """
    keys = jax.random.split(key, 5)
    two = (num_examples, 2)  # of the subject and of the object
    noun = jax.random.randint(keys[0], two, 0, NOUNS)
    verb = jax.random.randint(keys[1], (num_examples,), 0, VERBS)
    adjective = jax.random.randint(keys[2], two, 0, ADJECTIVES)
    plural, described = (jax.random.bernoulli(k, 0.5, two) for k in keys[3:])
    always = jnp.ones(num_examples, bool)

    def source_phrase(i):
        """Makes phrase i (0 subject, 1 object) as pairs of (word, whether it is there): adjective,
        noun and the mark of the plural."""
        words = (
            adjective[:, i] + NOUNS + VERBS,
            noun[:, i],
            jnp.full_like(verb, PLURAL - FIRST_WORD),
        )
        return zip(words, (described[:, i], always, plural[:, i]), strict=True)

    source = [*source_phrase(0), (verb + NOUNS, always), *source_phrase(1)]

    def target_phrase(i):
        """Translates phrase i: two pairs of (word, whether it is there), noun and adjective."""
        form = 2 * lexicon.nouns[noun[:, i]] + plural[:, i]
        gender = lexicon.genders[noun[:, i]]
        adjective_form = 2 * (NOUNS + VERBS + lexicon.adjectives[adjective[:, i]]) + gender
        return (form, always), (adjective_form, described[:, i])

    form = 2 * (NOUNS + lexicon.verbs[verb]) + plural[:, 0]
    target = [(form, always), *target_phrase(0), *target_phrase(1)]
    return between_marks(*_sentence(source), *_sentence(target))


def _sentence(words) -> tuple[Int[Array, "b n"], Bool[Array, "b n"]]:
    """Joins (word, whether it occurs) by place to token ids and which exist, without gaps."""
    ids = jnp.stack([word for word, _ in words], axis=1)  # [b, n]
    occurs = jnp.stack([does_occur for _, does_occur in words], axis=1)
    order = jnp.argsort(~occurs, axis=1, stable=True)  # the words that occur first
    ids = jnp.take_along_axis(ids, order, axis=1)
    occurs = jnp.take_along_axis(occurs, order, axis=1)
    return ids + FIRST_WORD, occurs
