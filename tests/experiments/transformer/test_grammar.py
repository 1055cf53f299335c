"""The grammar of run_transformer: every target is the translation of its source."""

import itertools

import jax
import numpy as np

from experiments.transformer import grammar
from experiments.transformer.grammar import FIRST_WORD, PLURAL
from rank_collapse.training.tasks.sequences import BEGIN, END


def translate(sentence, lexicon):
    """Translates a sentence word by word into token ids."""
    nouns, verbs = grammar.NOUNS, grammar.VERBS
    noun_of, verb_of, adjective_of, gender_of = (
        np.asarray(a).tolist()
        for a in (lexicon.nouns, lexicon.verbs, lexicon.adjectives, lexicon.genders)
    )
    words = list(sentence)

    def read_phrase():
        adjective = None
        if words[0] - FIRST_WORD >= nouns + verbs:
            adjective = words.pop(0) - FIRST_WORD - nouns - verbs
        noun = words.pop(0) - FIRST_WORD
        assert 0 <= noun < nouns
        plural = bool(words) and words[0] == PLURAL
        if plural:
            words.pop(0)
        out = [FIRST_WORD + 2 * noun_of[noun] + plural]
        if adjective is not None:
            word = 2 * (nouns + verbs + adjective_of[adjective]) + gender_of[noun]
            out.append(FIRST_WORD + word)
        return out, plural

    subject, plural = read_phrase()
    verb = words.pop(0) - FIRST_WORD - nouns
    assert 0 <= verb < verbs
    object_, _ = read_phrase()
    assert not words
    return [BEGIN, FIRST_WORD + 2 * (nouns + verb_of[verb]) + plural, *subject, *object_, END]


def test_words_of_a_phrase_are_drawn_independently():
    """In 400 phrases nearly all of the 72 pairs of an adjective and a noun occur."""
    lexicon = jax.jit(grammar.make_lexicon)(jax.random.key(4))
    pairs = jax.jit(lambda k: grammar.make_pairs(k, 200, lexicon))(jax.random.key(0))
    first_adjective = FIRST_WORD + grammar.NOUNS + grammar.VERBS
    described = {
        (word, noun)
        for source in pairs.source.tolist()
        for word, noun in itertools.pairwise(source)
        if word >= first_adjective and FIRST_WORD <= noun < FIRST_WORD + grammar.NOUNS
    }
    assert len(described) > 55


def test_every_target_is_the_translation_of_its_source():
    lexicon = jax.jit(grammar.make_lexicon)(jax.random.key(4))
    sizes = [sorted(words.tolist()) for words in (lexicon.nouns, lexicon.verbs, lexicon.adjectives)]
    assert sizes == [list(range(12)), list(range(6)), list(range(6))]
    assert lexicon.genders.sum() == 6
    pairs = jax.jit(lambda k: grammar.make_pairs(k, 200, lexicon))(jax.random.key(0))
    assert pairs.source.shape == (200, 7) and pairs.target.shape == (200, 7)
    lengths = set()
    for source, exists, target, written in zip(
        *(a.tolist() for a in jax.tree.leaves(pairs)), strict=True
    ):
        sentence = [w for w, e in zip(source, exists, strict=True) if e]
        assert exists == sorted(exists, reverse=True)
        assert [w for w, e in zip(target, written, strict=True) if e] == translate(
            sentence, lexicon
        )
        lengths.add(len(sentence))
    assert lengths == {3, 4, 5, 6, 7}
    assert pairs.target.max() < grammar.VOCAB_SIZE and pairs.source.max() < grammar.VOCAB_SIZE
