"""Beam search: the texts and scores of transformers, ends of texts, refusals."""

import dataclasses

import pytest
import torch
import transformers

import meshwright
from meshwright.base.errors import NON_FINITE, UserError
from meshwright.config.schema import Sampling
from meshwright.generation import beam
from meshwright.generation.beam import BeamOptions
from meshwright.generation.requests import Request

pytestmark = pytest.mark.whole  # importing transformers takes seconds
VOCAB, LENGTH = 24, 32
EOD = VOCAB - 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A network of transformers with large random weights, and ours with the same."""
    folder = tmp_path_factory.mktemp("theirs")
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.6,
        bos_token_id=EOD,
        eos_token_id=EOD,
    )
    transformers.set_seed(5)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder)
    mine = meshwright.load(folder, device="cpu", tokenizer_type="NullTokenizer", vocab_size=EOD)
    return mine, theirs


def request(prompt, most, **more):
    return Request(prompt, Sampling(out_seq_length=most), **more)


def expected(theirs, prompt, most, width, penalty):
    out = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=most,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        do_sample=False,
        pad_token_id=EOD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = []
    for row in out.sequences[:, len(prompt) :].tolist():
        texts.append(row[: row.index(EOD)] if EOD in row else row)
    return texts, out.sequences_scores


@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (5, 0.0), (2, -1.0)])
def test_equals_transformers(pair, width, penalty):
    """All texts of the search agree, with their scores; some end early, some at the limit."""
    mine, theirs = pair
    ends = set()
    for prompt in ([1], [3, 5, 7], [0, 8] * 13):
        for most in (1, 12):
            most = min(most, LENGTH - len(prompt))
            found = beam.search_beams(mine, request(prompt, most), BeamOptions(width, penalty))
            texts, scores = expected(theirs, prompt, most, width, penalty)
            assert [f.tokens for f in found] == texts
            torch.testing.assert_close(
                torch.tensor([f.score for f in found]), scores, rtol=1e-4, atol=1e-4
            )
            ends |= {f.finish for f in found}
    assert ends == {"stop", "length"}


def test_scores_are_those_of_the_model(pair):
    """A token's log-probability is the model's; without a penalty the score is their sum."""
    mine, _ = pair
    for found in beam.search_beams(mine, request([4, 4], 6), BeamOptions(4, 0.0)):
        ids = [4, 4, *found.tokens, *[EOD] * found.ended]
        every = mine.logits(ids[:-1])[1:].log_softmax(-1)
        chosen = every[range(len(ids) - 2), ids[2:]].tolist()
        assert found.logprobs == pytest.approx(chosen[: len(found.tokens)], abs=1e-5)
        assert found.score == pytest.approx(sum(chosen), abs=1e-5)


def test_what_cannot_be_searched(pair):
    mine, _ = pair
    with pytest.raises(UserError, match="beam width of 0"):
        beam.search_beams(mine, request([6], 9), BeamOptions(0))
    with pytest.raises(UserError, match=f"has {LENGTH} tokens; the model reads {LENGTH}"):
        beam.search_beams(mine, request([1] * LENGTH, 9), BeamOptions(2))
    model = torch.nn.Module()
    model.wte, model.vocab, model.layers = mine.model.wte, VOCAB, 2
    model.forward = lambda tokens, where, last_only: torch.full((1, 1, VOCAB), float("nan"))
    with pytest.raises(UserError, match="not finite") as caught:
        beam.search_beams(dataclasses.replace(mine, model=model), request([1], 9), BeamOptions(2))
    assert caught.value.status == NON_FINITE


def test_another_token_may_end_the_texts(pair):
    """A search that ends at token 3 finds no text with a 3 inside, and some that end there."""
    mine, _ = pair
    found = beam.search_beams(mine, request([1, 2], 8), BeamOptions(4, 1.0, stop_token=3))
    assert not any(3 in text.tokens for text in found)
    usual = beam.search_beams(mine, request([1, 2], 8), BeamOptions(4))
    first = usual[0].tokens[1]
    assert any(
        text.ended
        for text in beam.search_beams(
            mine, request([1, 2], 8), BeamOptions(4, 1.0, stop_token=first)
        )
    )
