"""The decoder: a text depends on its request alone, rows end as they should, slots are reused."""

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from meshwright.base.errors import NON_FINITE, UserError
from meshwright.config import flags
from meshwright.config.schema import Model, Sampling, TrainConfig
from meshwright.data.tokenizers import Null
from meshwright.generation.decoder import Decoder, complete, run_request, run_requests
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.requests import Completion, Request
from meshwright.model.decode import reason_against
from meshwright.model.gpt import GPT, initialise
from meshwright.model.positions import Positions
from network_values import models_beyond

VOCAB, LENGTH, EOD = 11, 20, 10
GREEDY = Sampling(greedy=True, out_seq_length=12)
SHAPES = {
    "gpt2": Model(),
    "llama": Model(
        position_embedding_type="rope", num_query_groups=1, normalization="RMSNorm", swiglu=True
    ),
    "qwen3": Model(
        position_embedding_type="rope",
        num_query_groups=1,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        qk_layernorm=True,
    ),
    "normed": Model(qk_layernorm=True, apply_layernorm_1p=True),
    "neox": Model(position_embedding_type="rope", rotary_percent=0.5, use_parallel_residual=True),
    "nanogpt": Model(add_bias_linear=False, layernorm_bias=False, bias_gelu_fusion=False),
    "yarn": Model(
        position_embedding_type="rope",
        rotary_base=50.0,
        rope_scaling="yarn",
        original_max_position_embeddings=8,
    ),
    "alibi": Model(position_embedding_type="alibi"),
    "capped": Model(final_logit_softcapping=1.0),
    "window": Model(position_embedding_type="rope", window_size="3,0", window_attn_skip_freq="2"),
}
# Groups of the table that the shapes above hold, or that other tests of the network compute.
LISTED = {"layers", "heads", "groups", "ffn", "activation", "position", "window", "norm"}
LISTED |= {"norm of heads", "bias", "norm of embeddings", "residual", "initial", "carried over"}
LISTED |= {"logits", "head", "sequence"}
SHAPES |= models_beyond(LISTED)


def little(shape="gpt2", seed=1, dtype=torch.float64):
    m = dataclasses.replace(
        SHAPES[shape], num_layers=2, hidden_size=16, num_attention_heads=2, init_method_std=1.0
    )
    model = GPT(m, VOCAB, 16, LENGTH)
    initialise(model.named_parameters(), m, VOCAB, seed)
    model.requires_grad_(False)
    draw_norms_of_heads(model)
    return LanguageModel(model.to(dtype).eval(), Null(EOD), 0, LENGTH)


def draw_norms_of_heads(model):
    """Let queries and keys have weights of their own, far from those of a new network."""
    random = torch.Generator().manual_seed(0)
    for name, vector in model.named_parameters():
        if ".ln_q." in name or ".ln_k." in name:
            vector.normal_(0.5, generator=random)


PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9], [1] * 18, [2] * 19, [], [3] * 9, [4, 4]]


def requests(settings, prompts=PROMPTS, **more):
    return [Request(prompt, settings, 3, i, **more) for i, prompt in enumerate(prompts)]


def completions(decoder, some):
    """Return the texts of requests by a decoder of the test's own."""
    texts = [Completion(decoder.model.tokenizer, request) for request in some]
    for number, event in run_requests(decoder, some):
        texts[number].add(event)
    return texts


def test_threads_that_share_a_model_take_turns(monkeypatch):
    """Its decoder's cache and graphs serve one call at a time."""
    model, inside, both = little(), [], threading.Event()

    def run(*_):
        inside.append(threading.get_ident())
        if len(inside) == 1:
            assert not both.wait(0.05)  # the other thread waits
        else:
            both.set()
        return [Completion(model.tokenizer, Request([1], GREEDY, 3, 0))]

    monkeypatch.setattr("meshwright.generation.decoder.complete", run)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(model.generate, ([1], [2]))) == ["", ""] and len(inside) == 2


def scripted(monkeypatch, model, script):
    """Let the model give each text, known by its first token, the next token of a script."""

    def forward(tokens, where, last_only=False):
        cached = where.cached
        if cached.seen == 0:
            forward.first.update(zip(cached.slots.tolist(), tokens[:, 0].tolist(), strict=True))
        out = torch.zeros(len(tokens), 1, 16, dtype=torch.float64)
        for row, slot in enumerate(cached.slots.tolist()):
            out[row, 0, next(script[forward.first[slot]])] = 9.0
        return out

    forward.first = {}
    monkeypatch.setattr(model.model, "forward", forward)


SETTINGS = {
    "greedy": GREEDY,
    "hot": Sampling(temperature=2.0, out_seq_length=12),
    "top-p": Sampling(top_p=0.8, out_seq_length=12),
    "penalty": Sampling(
        temperature=1.5, repetition_penalty=1.5, min_p=0.01, top_k=9, out_seq_length=12
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_cache_and_batch_change_nothing(name, shape):
    """Unequal prompts: with a cache and without, together, in turns, and each alone."""
    model, settings = little(shape), SETTINGS[name]
    together = complete(model, requests(settings, logprobs=3), 8)
    again = complete(model, requests(dataclasses.replace(settings, recompute=True), logprobs=3), 8)
    for a, b in zip(together, again, strict=True):
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
    for slots in (1, 3):
        assert [c.tokens for c in complete(model, requests(settings), slots)] == [
            c.tokens for c in together
        ]
    assert len(together[3].tokens) <= 2 and len(together[4].tokens) <= 1


@pytest.mark.parametrize("recompute", [False, True])
def test_penalties_by_count(recompute):
    """Beside texts without them, and in a slot that had another text."""
    model, options = little(), dataclasses.replace(GREEDY, recompute=recompute)
    each = [{}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"presence_penalty": -2.0}]
    some = [Request([2], options, **more) for more in each for _ in range(2)]
    for request, text in zip(some, complete(model, some, 3), strict=True):
        tokens, counts = [2], torch.zeros(VOCAB, dtype=torch.float64)
        while len(text.tokens) + 1 > len(tokens):
            logits = model.logits(tokens)[-1] - request.frequency_penalty * counts
            tokens.append(int((logits - request.presence_penalty * (counts > 0)).argmax()))
            counts[tokens[-1]] += 1
        assert text.tokens == tokens[1:]
    assert len({str(text.tokens) for text in complete(model, some, 8)}) == 4


def test_each_row_ends_separately(monkeypatch):
    """A row ends at its end of document, after its number of tokens, or at the sequence length."""
    model = little()
    script = {0: iter([4, 4, 10]), 1: iter([5] * 99), 2: iter([10]), 3: iter([6] * 99)}
    scripted(monkeypatch, model, script)
    prompts = [[0], [1] + [2] * 16, [2] * 4, [3]]
    rows = complete(model, requests(Sampling(greedy=True, out_seq_length=5), prompts), 4)
    assert [r.tokens for r in rows] == [[4, 4], [5] * 3, [], [6] * 5]
    assert [(r.finish, r.ended) for r in rows] == [
        ("stop", True),
        ("length", False),
        ("stop", True),
        ("length", False),
    ]
    rows = complete(model, requests(Sampling(greedy=True, out_seq_length=999), [[3]]), 4)
    assert rows[0].tokens == [6] * 19


def test_slots_are_reused_and_requests_cancelled():
    """Two slots, six requests, one of which is cancelled waiting and one after its second token."""
    model = little()
    wanted = {
        i: c.tokens
        for i, c in enumerate(complete(model, requests(GREEDY, [[i] for i in range(6)]), 6))
    }
    decoder, some = Decoder(model, 2), requests(GREEDY, [[i] for i in range(6)])
    got = [Completion(model.tokenizer, request) for request in some]
    for request in some:
        decoder.submit(request)
    assert (decoder.waiting, decoder.active) == (6, 0)
    decoder.cancel(3)
    decoder.cancel(99)
    assert decoder.waiting == 5
    most = 0
    while decoder.waiting or decoder.active:
        for event in decoder.step():
            got[event.id].add(event)
            if event.id == 1 and len(got[1].tokens) == 2:
                decoder.cancel(1)
                assert decoder.active < 2
        most = max(most, decoder.active)
    assert most == 2 and got[3].tokens == [] and got[1].tokens == wanted[1][:2]
    for i in (0, 2, 4, 5):
        assert got[i].tokens == wanted[i]


def test_each_token_comes_when_it_is_chosen(monkeypatch):
    model, chosen = little(), []
    scripted(monkeypatch, model, {1: (chosen.append(4) or 4 for _ in range(9))})
    events = run_request(model, Request([1], dataclasses.replace(GREEDY, out_seq_length=3)))
    assert next(events).token == 4 and len(chosen) <= 2
    events.close()
    assert not model.decoder(1, 4).active


@pytest.mark.parametrize("k", [0, 3, 99])
def test_echo_scores_the_prompt_as_a_full_forward(k, monkeypatch):
    """In one chunk and in several, with no new tokens, and at the full length."""
    model, prompt = little(), [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    want = model.model(torch.tensor([prompt]), Positions())[0, :, :VOCAB].log_softmax(-1)
    monkeypatch.setattr("meshwright.generation.decoder.ECHO_CHUNK", 4 if k else 512)
    for new in (0, 1):
        settings = Sampling(greedy=True, out_seq_length=new)
        (done,) = complete(model, [Request(prompt, settings, logprobs=k, echo=True)], 1)
        assert (
            done.prompt_tokens == prompt
            and done.prompt_logprobs[0] is None
            and done.prompt_tops[0] == []
        )
        exact = [float(want[i, t]) for i, t in enumerate(prompt[1:])]
        assert done.prompt_logprobs[1:] == pytest.approx(exact, abs=1e-9)
        for top, row in zip(done.prompt_tops[1:], want, strict=False):
            assert [i for i, _ in top] == row.argsort(descending=True)[:k].tolist()
            assert [x for _, x in top] == pytest.approx(
                row.sort(descending=True).values[:k].tolist(), abs=1e-9
            )
        assert len(done.tokens) == len(done.logprobs) == new and done.finish == "length"
        if new:
            assert done.logprobs[0] == pytest.approx(float(want[-1].max()), abs=1e-9)
    (full,) = complete(
        model, [Request([1] * LENGTH, Sampling(out_seq_length=0), logprobs=0, echo=True)], 1
    )
    assert len(full.prompt_logprobs) == LENGTH and full.tokens == []


@pytest.mark.parametrize("shape", ["llama", "window"])
def test_long_prompts_are_read_in_chunks(shape, monkeypatch):
    model = little(shape)
    want = [c.tokens for c in complete(model, requests(GREEDY), 8)]
    monkeypatch.setattr("meshwright.generation.decoder.CHUNK", 4)
    monkeypatch.setattr("meshwright.generation.decoder.PREFILL", 20)
    assert [c.tokens for c in complete(model, requests(GREEDY), 8)] == want


@pytest.mark.parametrize("settings", [GREEDY, Sampling()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad, settings):
    model = little()
    model.model.ln_f.weight.data[3] = bad
    with pytest.raises(UserError, match="not finite") as caught:
        complete(model, [Request([1], settings)], 1)
    assert caught.value.status == NON_FINITE


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([11]), "token id 11 is outside of the vocabulary, 0 ... 10"),
        (Request([1] * LENGTH), "the prompt has 20 tokens; the model reads 20"),
        (Request([1], Sampling(out_seq_length=0)), "max_new_tokens 0 must be above 0"),
        (Request([1], Sampling(temperature=math.nan)), "temperature nan"),
        (Request([1], Sampling(min_p=1.5)), "min_p 1.5 must be from 0 to 1"),
        (Request([1], Sampling(repetition_penalty=0.0)), "repetition_penalty 0 must be above 0"),
        (Request([1], logprobs=-1), "logprobs -1"),
        (Request([1], stop=("a", "")), "a stop string is empty"),
    ],
)
def test_bad_requests_are_refused(request_, message):
    with pytest.raises(UserError, match=message):
        Decoder(little(), 1).submit(request_)


class Recorded:
    """Captures for CPUs: a replay runs the function again."""

    made = 0

    def __init__(self, device):
        pass

    def prepare(self):
        pass

    def capture(self, run):
        Recorded.made += 1
        return run


@pytest.fixture
def fused(monkeypatch):
    """Run the fused step's plain references on a CPU, with captures that run the function again."""
    monkeypatch.setattr("meshwright.generation.decoder.reason_against", lambda model: None)
    monkeypatch.setattr("meshwright.generation.steps.CudaGraphs", Recorded)
    monkeypatch.setattr("meshwright.base.device.new_stream", lambda device: None)
    monkeypatch.setattr(Recorded, "made", 0)


@pytest.mark.parametrize(
    ("shape", "slots"),
    [
        *(("gpt2", 1), ("llama", 3), ("capped", 1), ("yarn", 3)),
        *(("qwen3", 1), ("qwen3", 3), ("normed", 3)),
    ],
)
def test_the_fused_step_changes_nothing(shape, slots, fused):
    """Captured, for one row and for several, with all kinds of choices in one batch."""
    model = little(shape)
    some = [
        dataclasses.replace(r, options=s)
        for r, s in zip(requests(GREEDY), [*SETTINGS.values()] * 2, strict=True)
    ]
    some[2] = dataclasses.replace(some[2], logprobs=3)
    again = [
        dataclasses.replace(r, options=dataclasses.replace(r.options, recompute=True)) for r in some
    ]
    want, decoder = complete(model, again, 8), Decoder(model, slots)
    assert decoder.steps is not None
    decoder.steps.captures = True
    got = completions(decoder, some)
    assert Recorded.made > 0 and [c.tokens for c in got] == [c.tokens for c in want]
    assert got[2].logprobs == pytest.approx(want[2].logprobs, abs=1e-9)


def test_a_thread_captures_nothing_that_it_has_not_run(fused):
    """A server warms up in its main thread; libraries make a handle for each thread."""
    decoder = Decoder(little(), 1)
    decoder.steps.captures = True

    def drive():
        completions(decoder, [Request([1, 2], dataclasses.replace(GREEDY, out_seq_length=2))])

    made = []
    drive()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            thread.submit(drive).result()
            made.append(Recorded.made)
    assert made == [0, 2]  # the prompt and the step


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", ["gpt2", "capped", "qwen3", "normed"])
@pytest.mark.parametrize("slots", [1, 3, 20])
def test_captured_on_a_gpu(slots, shape):
    """All kinds of choices, unequal prompts and reused slots: the plain texts, in two decoders.

    The last one is driven by a thread of its own after its first steps, as a server does.
    """
    m = dataclasses.replace(
        SHAPES[shape], num_layers=2, hidden_size=256, num_attention_heads=4, init_method_std=0.1
    )
    network = GPT(m, 500, 512, 300).eval().requires_grad_(False)
    initialise(network.named_parameters(), m, 500, 1)
    draw_norms_of_heads(network)
    model = LanguageModel(network.cuda(), Null(499), 0, 300)
    some = [
        Request(
            [(7 * i + j) % 490 for j in range(1 + 11 * i)],
            dataclasses.replace(s, out_seq_length=40),
            stream=i,
            frequency_penalty=i // 4 % 2 / 4,
        )
        for i, s in enumerate([*SETTINGS.values()] * 6)
    ]
    texts = []

    def drive(decoder, requests=some):
        texts.append([c.tokens for c in completions(decoder, requests)])

    for graphs in ("off", "on"):
        drive(Decoder(model, slots, graphs=graphs))
    decoder = Decoder(model, slots, graphs="on")
    drive(decoder, [Request([], Sampling(out_seq_length=4))])
    texts.pop()
    thread = threading.Thread(target=drive, args=[decoder])
    thread.start()
    thread.join()
    steps = decoder.steps
    assert texts[0] == texts[1] == texts[2] and steps.tried
    assert all(steps.runs[key].__name__ == "replayed" for key in steps.tried)


def test_what_the_host_reads_one_step_later(monkeypatch):
    """Run ahead as on a GPU: the same events, and a row's superfluous token is dropped."""
    model = little()
    want = complete(model, requests(GREEDY, stop=("7",)), 3)
    monkeypatch.setattr("meshwright.generation.decoder.to_pinned", lambda x: x.clone())
    decoder = Decoder(model, 3)
    decoder.is_asynchronous = True
    reached = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda device: reached)
    got = completions(decoder, requests(GREEDY, stop=("7",)))
    assert [(c.tokens, c.finish) for c in got] == [(c.tokens, c.finish) for c in want]


def test_why_a_network_has_no_fused_step():
    assert "no Triton kernels" in reason_against(little().model)
    with pytest.raises(
        UserError, match="cannot be captured in CUDA graphs: the device has no Triton kernels"
    ):
        Decoder(little(), 1, graphs="on")


@pytest.mark.parametrize("depth", [1, 12])
@pytest.mark.parametrize("more", ["", "--squared-relu", "--num-query-groups=2"])
def test_networks_of_the_modern_recipe_have_a_fused_step(depth, more, monkeypatch):
    """With heads of 64 numbers and of 128."""
    monkeypatch.setattr("meshwright.base.device.has_kernels", lambda device: True)
    argv = ["--recipe=modern", f"--depth={depth}", "--mock-data", "--vocab-size=64", *more.split()]
    m = flags.parse_settings(TrainConfig, argv, "meshwright train").config.model
    assert m.qk_layernorm and m.head_dim == (64 if depth == 1 else 128)
    with torch.device("meta"):
        assert reason_against(GPT(m, 64, 64, 128)) is None


def test_top_p_decays_to_its_least():
    """A text equals single tokens, each with its own top_p; other texts keep theirs."""
    model, hot = little(), Sampling(temperature=1.5, top_p=0.9, out_seq_length=10)
    usual = [Request([1, 2], hot, 3, stream) for stream in range(6)]
    decaying = [dataclasses.replace(r, top_p_decay=0.6, top_p_floor=0.2) for r in usual]
    found = [c.tokens for c in complete(model, [*decaying, *usual], 12)]
    assert found[6:] == [c.tokens for c in complete(model, usual, 6)] != found[:6]
    for request, text in zip(decaying, found, strict=False):
        tokens, top_p = [], 0.9
        while len(tokens) < 10 and EOD not in tokens:
            one = dataclasses.replace(hot, top_p=top_p, out_seq_length=1)
            [done] = complete(model, [Request([1, 2, *tokens], one, 3, request.stream)], 1)
            tokens += done.tokens or [EOD]
            top_p = max(top_p * 0.6, 0.2)
        assert [t for t in tokens if t != EOD] == text


@pytest.mark.parametrize(
    "settings", [GREEDY, Sampling(temperature=3.0, out_seq_length=12)], ids=["greedy", "hot"]
)
def test_a_token_that_may_not_follow_another(settings):
    """The prompt's last token counts too; other texts do not change."""
    model, changed = little(), 0
    usual = complete(model, requests(settings, PROMPTS[:3]), 3)
    for n, (request, text) in enumerate(zip(requests(settings, PROMPTS[:3]), usual, strict=True)):
        whole = [*(request.prompt or [EOD])[-1:], *text.tokens]
        for pair in set(zip(whole, whole[1:], strict=False)):
            others = [
                dataclasses.replace(r, forbidden_pair=pair) if i == n else r
                for i, r in enumerate(requests(settings, PROMPTS[:3]))
            ]
            found = complete(model, others, 3)
            now = [whole[0], *found[n].tokens]
            assert pair not in zip(now, now[1:], strict=False)
            assert [c.tokens for c in found[:n] + found[n + 1 :]] == [
                c.tokens for c in usual[:n] + usual[n + 1 :]
            ]
            changed += 1
    assert changed > 2
