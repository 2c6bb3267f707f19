"""Flags of the programs that people come from which are none of ours, and the answer to each."""

from __future__ import annotations

RETIRED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--data-parallel-size": "the number of started processes",
    "--datasets": "--input",
    "--no-position-embedding": "--position-embedding-type none",
}

# Flags of another world: accepted with the number of values they take, told once a run, and why they do nothing here.
NO_EFFECT: dict[str, tuple[int, str]] = {
    "--DDP-impl": (1, "gradients live in one flat buffer, whatever the choice"),
    "--use-flash-attn": (0, "torch's attention picks the fastest kernel by itself"),
    "--no-masked-softmax-fusion": (0, "no fused softmax kernel is compiled"),
    "--no-bias-dropout-fusion": (0, "no fusion changes the result here"),
    "--no-scale-tril-softmax-dropout-fusion": (0, "no fusion changes the result here"),
    "--multihead-attention-fusion": (0, "queries, keys and values are one matrix always"),
    "--no-query-key-layer-scaling": (0, "attention scores are float32, so no scaling is needed"),
    "--apply-query-key-layer-scaling": (0, "attention scores are float32, so no scaling is needed"),
    "--attention-softmax-in-fp32": (0, "the softmax is float32 always"),
    "--accumulate-allreduce-grads-in-fp32": (0, "gradients are accumulated in float32 always"),
    "--no-gradient-accumulation-fusion": (0, "gradients are accumulated in float32 in place always"),
    "--no-async-tensor-model-parallel-allreduce": (0, "the collectives are chosen by the layout"),
    "--no-contiguous-buffers-in-local-ddp": (0, "gradients live in one flat buffer always"),
    "--no-persist-layer-norm": (0, "torch's layer norm is used always"),
    "--no-scatter-gather-tensors-in-pipeline": (0, "how stages send activations changes no result"),
    "--use-cpu-initialization": (0, "weights are drawn on the CPU always, so that no layout changes them"),
    "--lazy-mpu-init": (1, "nothing is initialised by an outer program"),
    "--empty-unused-memory-level": (1, "torch's allocator keeps its cache"),
    "--transformer-impl": (1, "there is one implementation, picked for the device"),
    "--no-data-sharding": (0, "samples are read in one order, whatever the ranks"),
    "--use-rdma": (0, "NCCL finds InfiniBand by itself"),
    "--no-initialization": (0, "weights are always initialised"),
    "--no-barrier-with-level-1-timing": (0, "timers wait for their own device"),
    "--distribute-saved-activations": (0, "--sequence-parallel splits activations over tensor ranks"),
    "--standalone-embedding-stage": (0, "--pipeline-layout can give the first stage fewer layers"),
    "--overlap-p2p-communication": (0, "how stages send activations changes no result"),
    "--use-ring-exchange-p2p": (0, "how stages send activations changes no result"),
    "--no-pipeline-parallel": (0, "with one stage there is no pipeline"),
    "--adlr-autoresume": (0, "it asks a service of NVIDIA's own cluster; SIGTERM saves and leaves anywhere"),
    "--adlr-autoresume-interval": (1, "it asks a service of NVIDIA's own cluster; SIGTERM saves and leaves anywhere"),
    "--codecarbon-dir": (1, "energy is not measured; run codecarbon beside it"),
    "--inference-batch-times-seqlen-threshold": (1, "generation has no pipeline to fill"),
    "--max-tokens-to-oom": (1, "generation allots its memory before it starts"),
    "--contigious-checkpointing": (0, "DeepSpeed's memory layout, which changes no result"),
    "--checkpoint-in-cpu": (0, "DeepSpeed's memory layout, which changes no result"),
    "--synchronize-each-layer": (0, "DeepSpeed's scheduling, which changes no result"),
    "--profile-backward": (0, "DeepSpeed's own timer"),
    "--zero-reduce-scatter": (0, "the collectives are chosen by the layout"),
    "--zero-contigious-gradients": (0, "gradients live in one flat buffer always"),
    "--zero-reduce-bucket-size": (1, "one bucket is one block of the model"),
    "--zero-allgather-bucket-size": (1, "one bucket is one block of the model"),
    "--fp16-lm-cross-entropy": (0, "the loss reads half-precision logits and sums in float32 always"),
    "--cross-entropy-loss-fusion": (0, "the loss is fused always"),
    "--no-load-rng": (0, "randomness is a function of seed and sample number: there is no state"),
    "--no-save-rng": (0, "randomness is a function of seed and sample number: there is no state"),
    "--use-pin-memory": (0, "batches are pinned always on a GPU"),
    "--scattered-embeddings": (0, "DeepSpeed's memory layout, which changes no result"),
    "--split-transformers": (0, "DeepSpeed's memory layout, which changes no result"),
    "--memory-centric-tiled-linear": (0, "DeepSpeed's memory layout, which changes no result"),
    "--tile-factor": (1, "DeepSpeed's memory layout, which changes no result"),
    "--ctrl-port": (1, "torchrun's rendezvous port is used"),
    "--log": (1, "the log is standard output; figures are in metrics.jsonl of --run-dir"),
    "--metric-print-format": (1, "there is one log line; metrics.jsonl is for programs"),
    "--save-last": (0, "the last step is saved always"),
    "--profile-transformer-layer": (0, "OneFlow's own profiler"),
    # Of later Megatron-LMs:
    "--use-mcore-models": (0, "there is one model"),
    "--use-legacy-models": (0, "there is one model"),
    "--attention-backend": (1, "torch's attention picks the fastest kernel by itself"),
    "--overlap-grad-reduce": (0, "communication is overlapped always"),
    "--overlap-param-gather": (0, "communication is overlapped always"),
    "--tp-comm-overlap": (0, "communication is overlapped where it can be"),
    "--no-create-attention-mask-in-dataloader": (0, "masks are made on the device always"),
    "--num-dataset-builder-threads": (1, "sample indices are built in one go"),
    "--manual-gc": (0, "what a run is made of is hidden from Python's collector always"),
    "--manual-gc-interval": (1, "what a run is made of is hidden from Python's collector always"),
    "--use-dist-ckpt": (0, "every rank writes its part always"),
    "--auto-detect-ckpt-format": (0, "formats are recognised always"),
    "--ckpt-fully-parallel-save": (0, "every rank writes its part always"),
    "--no-ckpt-fully-parallel-save": (0, "every rank writes its part always"),
    "--partitions": (1, "workers share one input and write one pair of files, in the order of the input"),
    # Real flags of training, which the files of `preprocess` do not depend on:
    "--make-vocab-size-divisible-by": (1, "the files hold true ids; padding belongs to training"),
    "--pad-vocab-size-to": (1, "the files hold true ids; padding belongs to training"),
}

# Flags of the same programs that we shall not have, and whose absence would change the result: refused, by reason.
REFUSED = {
    "--use-torch-fsdp2": "it is --zero-stage 3 here",
    "--data-parallel-sharding-strategy": "it is --zero-stage here",
    "--data-parallel-random-init": "weights are a function of seed and name; the number of ranks never changes them",
    "--use-bnb-optimizer": "8-bit optimizer state is not planned; see --optimizer",
    "--use-external-dataset": "data is .bin/.idx; see --data-path",
    "--fp8": "8-bit training is not yet there; --bf16 is",
    **{
        f"--{name}": "it belongs to the launcher: it stands before the script's name"
        for name in (
            "nproc_per_node",
            "nnodes",
            "node_rank",
            "master_addr",
            "master_port",
            "nproc-per-node",
            "node-rank",
            "master-addr",
            "master-port",
            "hostfile",
            "include",
            "num_gpus",
        )
    },
}

# Flags of the same programs that belong to other models than GPT: refused, by what they are for.
OTHER_MODELS = {
    "BERT": (
        "bert",
        "mask-prob",
        "short-seq-prob",
        "classes-fraction",
        "data-per-class-fraction",
        "onnx-safe",
        "output-bert",
    ),
    "retrieval models": (
        "biencoder",
        "ict",
        "retriever",
        "indexer",
        "evidence-data",
        "titles-data",
        "block-data",
        "embedding-path",
        "query-in-block",
        "use-one-sent-docs",
        "retro",
        "head-lr-mult",
    ),
    "vision models": (
        "dino",
        "swin",
        "vision",
        "img-",
        "patch-dim",
        "num-channels",
        "num-classes",
        "mask-type",
        "mask-factor",
        "iter-per-epoch",
        "sample-rate",
    ),
    "encoder-decoder models": ("decoder-", "encoder-num-layers", "vocab-extra-ids", "pipeline-model-parallel-split"),
    "FP8 through Transformer Engine": ("fp8-", "no-fp8-"),
}


def known_elsewhere(name: str) -> str | None:
    """The answer to a flag that is no flag here but is one in the programs people come from."""
    if name in RETIRED:
        return f"{name} is no longer valid; use {RETIRED[name]}"
    if name in REFUSED:
        return f"{name} is refused: {REFUSED[name]}"
    for model, starts in OTHER_MODELS.items():
        if name.startswith(tuple("--" + s for s in starts)):
            return f"{name} is for {model}; Meshwright pre-trains GPT"
    return None
