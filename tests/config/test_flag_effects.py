"""Each flag of training has its effect in a tiny run's log, rows and files."""

import io
import json
import math
import signal

import pytest
import torch
from corpora import write_older

from helpers import SMALL_FLAGS, TINY, TINY_FLAGS
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TokenizerFlags, TrainConfig
from meshwright.config.text_inputs import Preprocess, PreprocessConfig
from meshwright.data.files.indexed import Indexed
from meshwright.data.text import preprocess
from meshwright.model.gpt import GPT, initialise

LOSSES = {}  # of runs by their flags, which several tests compare with


@pytest.fixture
def losses(run):
    """losses(flag, ...) returns those of a run without validations, which is made once."""

    def of(*flags):
        if flags not in LOSSES:
            made = run("--eval-iters=0", "--train-iters=4", "--micro-batch-size=4", *flags)
            assert made.status == 0
            LOSSES[flags] = made.losses
        return LOSSES[flags]

    return of


@pytest.fixture
def base(losses):
    """Return the losses without further flags."""
    return losses()


def parameters(
    layers=2,
    h=32,
    ffn=128,
    inner=32,
    kv=None,
    positions=16,
    vocab=64,
    untied=False,
    gate=1,
    biases=(1, 1, 1, 1),
    norm=2,
    more=0,
):
    rows = inner + 2 * (kv or inner)
    weights = h * rows + inner * h + (gate + 1) * h * ffn
    biased = sum(b * n for b, n in zip(biases, (rows, h, gate * ffn, h), strict=True))
    block = weights + biased + 2 * norm * h
    return vocab * h * (2 if untied else 1) + positions * h + layers * block + norm * h + more


RAMP = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.9".split()
ROPE = ["--position-embedding-type", "rope", "--rotary-base", "10"]
LLAMA3 = [*ROPE, "--use-rope-scaling", "--original-max-position-embeddings", "64"]
YARN = [*ROPE, "--rope-scaling", "yarn", "--original-max-position-embeddings", "64"]


@pytest.mark.flag(
    """num_layers hidden_size ffn_hidden_size kv_channels max_position_embeddings untie_embeddings_and_output_weights
    num_query_groups group_query_attention position_embedding_type swiglu glu_activation add_bias_linear
    layernorm_bias add_qkv_bias vocab_size"""
)
@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ([], parameters()),
        (["--num-layers", "3"], parameters(layers=3)),
        (["--hidden-size", "48"], parameters(h=48, ffn=192, inner=48)),
        (["--ffn-hidden-size", "40"], parameters(ffn=40)),
        (["--kv-channels", "4"], parameters(inner=16)),
        (["--max-position-embeddings", "20"], parameters(positions=20)),
        (["--vocab-size", "70"], parameters(vocab=70)),
        (["--untie-embeddings-and-output-weights"], parameters(untied=True)),
        (["--num-query-groups", "2"], parameters(kv=16)),
        (["--group-query-attention"], parameters(kv=8)),
        (["--position-embedding-type", "alibi"], parameters(positions=0)),
        (["--use-rotary-position-embeddings"], parameters(positions=0)),
        (["--position-embedding-type", "none"], parameters(positions=0)),
        (["--swiglu"], parameters(ffn=64, gate=2)),
        (["--glu-activation", "geglu"], parameters(gate=2)),
        (["--normalization", "RMSNorm"], parameters(norm=1)),
        (["--no-layernorm-bias"], parameters(norm=1)),
        (["--disable-bias-linear"], parameters(biases=(0, 0, 0, 0))),
        (["--no-add-bias-linear", "--add-qkv-bias"], parameters(biases=(1, 0, 0, 0))),
        (["--qk-layernorm"], parameters(more=2 * 2 * 2 * 8)),
        (["--embed-layernorm"], parameters(more=2 * 32)),
    ],
)
def test_sizes(flags, want):
    """The number of parameters equals a formula written independently."""
    config = parse_settings(TrainConfig, [*TINY_FLAGS, *flags], "test").config
    vocabulary, positions = config.tokenizer.vocab_size, config.model.max_position_embeddings
    with torch.device("meta"):
        model = GPT(config.model, vocabulary, vocabulary, positions)
    assert sum(weight.numel() for weight in model.parameters()) == want


@pytest.mark.flag(
    """num_attention_heads layernorm_epsilon hidden_dropout attention_dropout embedding_dropout
    attention_impl squared_relu normalization qk_layernorm embed_layernorm apply_residual_connection_post_layernorm
    use_parallel_residual init_method_xavier_uniform seq_length dataloader_type training.seed optimizer weight_decay
    clip_grad adam_beta1 adam_beta2 adam_eps final_logit_softcapping z_loss_coef window_size embedding_lr vector_lr
    zero_init_projections mup_base_hidden_size mup_base_num_layers"""
)
@pytest.mark.parametrize(
    "flags",
    [
        ["--num-attention-heads", "2"],
        ["--layernorm-epsilon", "0.1"],
        ["--init-method-std", "0.05"],
        ["--hidden-dropout", "0"],
        ["--attention-dropout", "0"],
        ["--embedding-dropout", "0"],
        ["--attention-impl", "sdpa"],
        ["--seq-length", "8"],
        ["--seed", "5"],
        ["--weight-decay", "10"],
        ["--clip-grad", "0.01"],
        ["--adam-beta1", "0.5"],
        ["--adam-beta2", "0.5"],
        ["--adam-eps", "0.1"],
        ["--bf16"],
        ["--params-dtype", "float64"],
        ["--squared-relu"],
        ["--no-bias-gelu-fusion", "--squared-relu"],
        ["--normalization", "RMSNorm"],
        ["--qk-layernorm"],
        ["--embed-layernorm"],
        ["--apply-residual-connection-post-layernorm"],
        ["--use-parallel-residual"],
        ["--init-method-xavier-uniform"],
        ["--zero-init-projections"],
        ["--embedding-lr", "1e-3"],
        ["--vector-lr", "0.1"],
        ["--optimizer", "sgd"],
        ["--optimizer", "lion"],
        ["--optimizer", "muon"],
        ["--bf16", "--fp32-residual-connection"],
        ["--dataloader-type", "cyclic"],
        ["--final-logit-softcapping", "0.5"],
        ["--z-loss-coef", "0.1"],
        ["--window-size", "5,0"],
        ["--mup-base-hidden-size", "8"],
        ["--mup-base-num-layers", "1"],
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_changes_the_losses(losses, base, flags):
    got = losses(*flags)
    assert len(got) == len(base) and got != base
    # these act from the second step on
    first = (
        "weight-decay",
        "clip-grad",
        "adam",
        "optimizer",
        "z-loss",
        "embedding-lr",
        "vector-lr",
    )
    assert (got[0] == base[0]) == flags[0].strip("-").startswith(first)


@pytest.mark.flag("bias_gelu_fusion")
def test_gelu_and_its_tanh_change_the_losses(losses):
    """They differ by at most 5e-4, and a float32 may round that away."""
    double = ("--params-dtype", "float64")
    approximate, exact = losses(*double)[0], losses(*double, "--no-bias-gelu-fusion")[0]
    assert 1e-9 < abs(approximate - exact) < 1e-4, (approximate, exact)


@pytest.mark.flag("distributed_backend distributed_timeout_minutes local_rank")
@pytest.mark.parametrize(
    "flags",
    [
        ["--attention-impl", "reference"],  # what `auto` takes on a CPU with attention dropout
        ["--no-bias-gelu-fusion", "--openai-gelu"],
        ["--optimizer", "adamw"],
        "--distributed-backend gloo --distributed-timeout-minutes 3 --local-rank 0".split(),
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_leaves_the_losses_equal(losses, base, flags):
    assert losses(*flags) == pytest.approx(base, rel=1e-6)


@pytest.mark.flag(
    """window_attn_skip_freq rotary_percent rotary_base rope_scaling rope_scaling_factor
    original_max_position_embeddings rope_low_freq_factor rope_high_freq_factor beta_fast beta_slow
    rope_attention_factor lr_wsd_decay_style lr_wsd_decay_iters lr_warmup_init
    start_weight_decay end_weight_decay weight_decay_incr_style sgd_momentum lion_beta1 lion_beta2
    muon_momentum muon_num_ns_steps muon_split_qkv fp32_residual_connection head_lr cautious_weight_decay"""
)
@pytest.mark.parametrize(
    ("flags", "other"),
    [
        (["--window-attn-skip-freq", "2"], ["--window-size", "5"]),
        (["--rotary-percent", "0.5"], ["--position-embedding-type", "rope"]),
        (["--rotary-base", "100"], ["--position-embedding-type", "rope"]),
        (["--rope-scaling", "linear"], ROPE),
        (["--rope-scaling-factor", "2"], [*ROPE, "--rope-scaling", "linear"]),
        (["--original-max-position-embeddings", "16"], LLAMA3),
        (["--rope-low-freq-factor", "0.5"], LLAMA3),
        (["--rope-high-freq-factor", "5"], LLAMA3),
        (["--beta-fast", "3"], YARN),
        (["--beta-slow", "0.1"], YARN),
        (["--rope-attention-factor", "2"], YARN),
        (["--fp32-residual-connection"], ["--bf16"]),
        (["--sgd-momentum", "0"], ["--optimizer", "sgd"]),
        (["--lion-beta1", "0.5"], ["--optimizer", "lion"]),
        (["--lion-beta2", "0.5"], ["--optimizer", "lion"]),
        (["--muon-momentum", "0.5"], ["--optimizer", "muon"]),
        (["--muon-num-ns-steps", "2"], ["--optimizer", "muon"]),
        (["--muon-split-qkv", "on"], ["--optimizer", "muon"]),
        (["--muon-split-qkv", "groups"], ["--optimizer", "muon", "--muon-split-qkv", "on"]),
        (
            ["--lr-wsd-decay-style", "linear"],
            ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3"],
        ),
        (["--lr-wsd-decay-iters", "2"], ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "3"]),
        (["--lr-warmup-init", "0.001"], ["--lr-warmup-iters", "3"]),
        (["--head-lr", "1e-3"], ["--untie-embeddings-and-output-weights"]),
        (["--cautious-weight-decay"], ["--weight-decay", "10"]),
        (["--weight-decay-incr-style", "rate"], ["--weight-decay", "10"]),
        (["--weight-decay-incr-style", "cosine"], RAMP),
        (["--start-weight-decay", "0.2"], RAMP),
        (["--end-weight-decay", "0.7"], RAMP),
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_changes_the_losses_of_another_run(losses, flags, other):
    assert losses(*other) != losses(*other, *flags)


@pytest.mark.flag("apply_layernorm_1p")
def test_weights_of_norms_around_one_do_not_decay(losses):
    """--apply-layernorm-1p stores them less one: rounded differently, and equal otherwise."""
    decay = ("--weight-decay", "0.3")
    assert losses(*decay) == pytest.approx(losses(*decay, "--apply-layernorm-1p"), rel=1e-6)


@pytest.mark.flag("lr_decay_samples lr_decay_tokens lr_warmup_samples lr_warmup_tokens")
def test_lengths_in_samples_and_tokens(run):
    """Equal to a run in steps of 4 samples of 16 tokens."""
    want = run("--eval-iters=0", "--lr-decay-iters", "5", "--lr-warmup-iters", "2")
    for flags in (
        "--train-samples 24 --lr-decay-samples 20 --lr-warmup-samples 8",
        "--train-tokens 384 --lr-decay-tokens 320 --lr-warmup-tokens 128",
        # as Megatron-DeepSpeed's scripts: what is used up first ends the run
        "--train-samples 99 --train-tokens 384 --lr-decay-tokens 320 --lr-warmup-samples 8",
        "--train-samples 24 --train-tokens 999 --lr-decay-tokens 320 --lr-warmup-samples 8",
    ):
        got = run("--eval-iters=0", "--train-iters", "none", *flags.split())
        assert got.losses == want.losses and got.column("lr") == want.column("lr")


@pytest.mark.flag("lr_wsd_decay_samples")
def test_wsd_in_samples(run):
    wsd = ["--eval-iters=0", "--lr-decay-style=WSD"]
    steps = run(*wsd, "--lr-wsd-decay-iters", "2")
    samples = run(*wsd, *"--train-iters none --train-samples 24 --lr-wsd-decay-samples 8".split())
    assert samples.column("lr") == steps.column("lr")


@pytest.mark.flag("init_method_std")
def test_smaller_initial_weights(run):
    assert run("--init-method-std", "1e-5", "--train-iters", "1").losses[0] == pytest.approx(
        math.log(64), abs=1e-4
    )


@pytest.mark.flag("make_vocab_size_divisible_by pad_vocab_size_to")
def test_padded_vocabulary(run):
    few = ["--train-iters", "1", "--eval-iters", "0"]
    divisible = run(*few, "--make-vocab-size-divisible-by", "40")
    assert "with 16 dummy tokens (new size: 80)" in divisible.out
    assert "with 192 dummy tokens (new size: 256)" in run(*few, "--pad-vocab-size-to", "256").out


@pytest.mark.flag("micro_batch_size global_batch_size")
def test_batch_sizes(run):
    got = run("--micro-batch-size", "4", "--global-batch-size", "12", "--train-iters", "2")
    assert "setting number of micro-batches to constant 3\n" in got.out
    assert got.column("consumed_samples") == [12, 24]
    got = run("--global-batch-size", "none", "--train-iters", "2")
    assert "setting global batch size to 2\n" in got.out and got.column("consumed_samples") == [
        2,
        4,
    ]


@pytest.mark.flag("train_iters eval_interval eval_iters logging.log_interval")
def test_length_and_validations(run):
    got = run(
        "--train-iters", "5", "--eval-interval", "2", "--eval-iters", "3", "--log-interval", "2"
    )
    assert got.column("iteration") == [1, 2, 3, 4, 5]
    assert got.column("iteration", "validation") == [2, 4, 5, 5]
    assert got.column("name", "validation") == ["validation"] * 3 + ["test"]
    assert f"    validation: {3 * 3 * 4}\n    test:       {3 * 4}\n" in got.out
    shown = [
        line.split("/")[0].split()[1]
        for line in got.out.splitlines()
        if line.startswith(" iteration ")
    ]
    assert shown == ["2", "4", "5"]  # and the last


@pytest.mark.flag("lr min_lr lr_decay_style lr_decay_iters lr_warmup_fraction lr_warmup_iters")
@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ("--lr-warmup-iters 2 --lr-decay-iters 4", [0.0, 0.01, 0.02, 0.0125, 0.005, 0.005]),
        (
            "--lr-warmup-fraction 0.5 --lr-decay-style cosine",
            [0.0, 0.02 / 3, 0.04 / 3, 0.02, 0.01625, 0.00875],
        ),
    ],
)
def test_learning_rates(run, flags, want):
    """A step's rate follows from the samples before it: linear warm-up, then the decay."""
    got = run("--eval-iters=0", "--lr=0.02", "--min-lr=0.005", *flags.split())
    assert got.column("lr") == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.flag("loss_scale")
def test_constant_loss_scale(run):
    assert run("--fp16", "--loss-scale", "128").column("loss_scale") == [128.0] * 6


@pytest.mark.flag("initial_loss_scale loss_scale_window hysteresis")
def test_dynamic_loss_scale(run):
    got = run("--fp16", "--initial-loss-scale=256", "--loss-scale-window=2", "--eval-iters=0")
    assert got.column("loss_scale") == [256.0, 256.0, 512.0, 512.0, 1024.0, 1024.0]
    soon = run("--fp16", "--train-iters=3", "--eval-iters=0", "--hysteresis=1")
    assert soon.column("loss_scale") == [2.0**32, 2.0**31, 2.0**30]


@pytest.mark.flag("min_loss_scale")
def test_least_loss_scale(run):
    got = run("--fp16", "--hysteresis", "1", "--min-loss-scale", str(2.0**31))
    assert got.status == 70 and "smallest loss scale" in got.err
    assert got.column("loss_scale") == [2.0**32, 2.0**31]


@pytest.mark.flag("recompute_granularity recompute_method recompute_num_layers")
@pytest.mark.parametrize(
    ("flags", "again"),
    [
        (["--checkpoint-activations"], 2),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2".split(),
            2,
        ),
        (
            "--recompute-granularity full --recompute-method block --checkpoint-num-layers 1".split(),
            1,
        ),
        (["--recompute-activations"], 0),
        ([], 0),
    ],
)
def test_recompute_runs_blocks_again(run, monkeypatch, flags, again):
    """Full recomputation runs layers again; selective recomputation only their attention."""
    from meshwright.model import attention, gpt

    calls, real = (
        {"block": 0, "attention": 0},
        {"block": gpt.Block.forward, "attention": attention.reference},
    )

    def counting(name):
        def call(*a, **k):
            calls[name] += 1
            return real[name](*a, **k)

        return call

    monkeypatch.setattr(gpt.Block, "forward", counting("block"))
    monkeypatch.setattr(attention, "reference", counting("attention"))
    assert run(*flags, "--train-iters", "1", "--eval-iters", "0").status == 0
    assert calls["block"] == 2 * (2 + again)  # micro-batches, layers
    assert calls["attention"] == 2 * (2 + (2 if flags == ["--recompute-activations"] else again))


@pytest.mark.flag("checkpoint_in_cpu")
def test_inputs_of_recomputed_layers_in_host_memory(run, monkeypatch):
    """--checkpoint-in-cpu moves what recomputation starts from, no more, and changes no bit."""
    from torch.autograd.graph import saved_tensors_hooks

    from meshwright.model import gpt

    full, kept = "--recompute-granularity full --train-iters 2 --eval-iters 0".split(), []

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(
        gpt, "save_on_cpu", lambda pin_memory: saved_tensors_hooks(pack, lambda tensor: tensor)
    )
    without = run(*full)
    assert not kept
    assert run(*full, "--checkpoint-in-cpu").losses == without.losses
    # Two steps of two micro-batches; the first layer has no residual yet, the second one has.
    # torch 2.11 keeps empty ones, too
    assert [shape for shape in kept if shape != (0,)] == [(2, 16, 32)] * (2 * 2 * 3)


@pytest.mark.flag("compile")
def test_compile(run, losses, base, monkeypatch):
    """`on` hands each block to the compiler, `off` and, on a CPU, `auto` do not."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda f, **how: made.append(how) or f)
    assert losses("--compile", "off") == base and not made
    compiled = run("--compile", "on", "--attention-impl", "sdpa", "--train-iters", "1")
    assert made == [{"dynamic": False}] * 2 and "running the compiled PyTorch block" in compiled.out
    plain = run("--compile", "on", "--train-iters", "1")
    assert "--compile on has no effect on layers with the reference attention" in plain.out


@pytest.mark.flag("fused_kernels")
def test_fused_kernels(losses, base):
    """`on` takes the blocks of fused kernels, whose numbers differ by rounding, `auto` on a GPU."""
    got = losses("--fused-kernels", "on")
    assert got == pytest.approx(base, rel=1e-5) and got != base


@pytest.mark.flag("loss_mean")
def test_loss_mean_weighs_tokens_or_micro_batches():
    """Two micro-batches, one of them nearly all masked."""
    from meshwright.config.schema import Optimizer
    from meshwright.data.loader import Batch
    from meshwright.model.loss import token_losses
    from meshwright.parallel.flat import FlatStore
    from meshwright.parallel.store import StoreSpec
    from meshwright.training.micro_step import Network
    from meshwright.training.step import StepSettings, train_step

    def loss(logits, batch):
        return {"loss": token_losses(logits, batch.labels, 64)}

    cpu, losses = torch.device("cpu"), {}
    tokens = torch.arange(64).view(2, 2, 16)
    masks = torch.ones(2, 2, 16)
    masks[1, :, 1:] = 0
    for how, parts in (("global", [0, 1]), ("microbatch", [0, 1]), ("first", [0]), ("second", [1])):
        with torch.device("meta"):
            model = GPT(TINY, 64, 64, 16)
        params = FlatStore([model], StoreSpec(Optimizer(lr=1.0), torch.float32, cpu, 64))
        params.initialise(lambda masters: initialise(masters, TINY, 64, 1))
        params.publish_weights()
        batches = [
            Batch(tokens[i], (tokens[i] + 1) % 64, torch.tensor([2 * i, 2 * i + 1]), masks[i])
            for i in parts
        ]
        flag = ["--loss-mean", how] if how in ("global", "microbatch") else []
        mean = parse_settings(
            TrainConfig, flag, "meshwright train", check=False
        ).config.training.loss_mean
        settings = StepSettings(1, 0.0, 0.0, loss_mean=mean)
        losses[how] = float(
            train_step(
                Network(parts=[model], store=params, loss=loss, device=cpu), batches, settings
            )[0]
        )
    assert losses["microbatch"] == pytest.approx((losses["first"] + losses["second"]) / 2)
    assert losses["global"] == pytest.approx((32 * losses["first"] + 2 * losses["second"]) / 34)
    assert losses["global"] != pytest.approx(losses["microbatch"], rel=1e-6)


@pytest.mark.flag("exit_signal_handler")
@pytest.mark.parametrize("flag", ["--exit-signal-handler", "--no-exit-signal-handler"])
def test_exit_signal_handler(run, monkeypatch, flag):
    """SIGTERM has our handler during a step, and the old one afterwards."""
    from meshwright.training import loop

    seen, real, before = [], loop.train_step, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        loop, "train_step", lambda *a: seen.append(signal.getsignal(signal.SIGTERM)) or real(*a)
    )
    assert run(flag, "--train-iters", "1").status == 0
    assert (seen[0] is before) == flag.startswith("--no-")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.flag("save load save_interval run_dir")
def test_files(run, tmp_path):
    """--save holds checkpoints, --run-dir the rest; the last step is always saved."""
    save = tmp_path / "save"
    assert run("--save", str(save), "--save-interval", "4").status == 0
    shown = sorted(p.name for p in save.iterdir() if not p.name.startswith("."))
    assert shown == ["iter_0000004", "iter_0000006", "latest_checkpointed_iteration.txt"]
    assert {"config.toml", "metrics.jsonl"} <= {p.name for p in (tmp_path / "run0").iterdir()}
    assert not list((tmp_path / "run0").glob("iter_*"))
    got = run("--load", str(save), "--train-iters", "8", "--override-opt_param-scheduler")
    assert got.column("iteration") == [7, 8] and len(list(save.glob("iter_*"))) == 2


@pytest.mark.flag("progress")
@pytest.mark.parametrize("flag", ["--progress", "--no-progress"])
def test_progress_bar(run, monkeypatch, flag):
    from meshwright.training.log import metrics

    class Bar:
        def stop(self):
            pass

        def update(self, *args, **kwargs):
            pass

    bars = []
    monkeypatch.setattr(metrics, "_start_bar", lambda total: bars.append(total) or (Bar(), 0))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(flag).status == 0
    assert bars == ([6] if flag == "--progress" else [])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two token files of bytes."""
    folder = tmp_path_factory.mktemp("data")
    for name in "ab":
        lines = [json.dumps({"text": f"document {n} of {name}, " * 4}) for n in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        settings = Preprocess(
            input=[str(folder / f"{name}.jsonl")], output_prefix=str(folder / name), append_eod=True
        )
        preprocess.preprocess(
            PreprocessConfig(settings, TokenizerFlags(tokenizer_type="ByteTokenizer")),
            io.StringIO(),
            io.StringIO(),
        )
    return folder


@pytest.mark.flag("eod_mask_loss reset_position_ids reset_attention_mask")
@pytest.mark.parametrize(
    "flag", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]
)
def test_ends_of_documents(run, losses, files, flag):
    """Each changes the losses, and needs a tokenizer with an end of document."""
    words = "--no-mock-data --tokenizer-type ByteTokenizer --vocab-size none --seq-length 40"
    words += f" --max-position-embeddings 40 --data-path {files}/a_text_document"
    flags = words.split()
    assert losses(*flags) != losses(*flags, flag)
    refused = run(flag)
    assert refused.status == 2
    assert flag in refused.err and "need a tokenizer" in refused.err


@pytest.mark.flag("data_path split data_impl train_data_path valid_data_path test_data_path")
def test_data_path_and_split(run, files):
    flags = "--no-mock-data --tokenizer-type ByteTokenizer --vocab-size none --train-iters 2"
    flags = [*SMALL_FLAGS, *flags.split()]
    a, b = (str(files / f"{name}_text_document") for name in "ab")
    first = run(*flags, "--split", "80,10,10", "--data-impl", "infer", "--data-path", a)
    assert "> building ByteTokenizer tokenizer ..." in first.out
    for line in ("[0, 32) total of 32 documents", "[32, 36) total of 4", "[36, 40) total of 4"):
        assert f"     document indices in {line}" in first.out
    apart = run(*flags, "--train-data-path", a, "--valid-data-path", b, "--test-data-path", a)
    assert apart.column("name", "validation") == ["validation", "test"]
    assert apart.losses != first.losses
    blend = run(*flags, "--data-path", "0.3", a, "0.7", b)
    assert blend.losses != first.losses and "dataset 1, input: 0.7" in blend.out
    data = Indexed(a)
    older = write_older(files / "older", [[data.document(n).tolist()] for n in range(40)])
    same = run(*flags, "--split", "80,10,10", "--data-impl", "lazy", "--data-path", older)
    assert same.losses == first.losses
