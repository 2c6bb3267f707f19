"""Flags of Megatron-LM and its descendants that Meshwright lacks, and the answer to each."""

from __future__ import annotations

RETIRED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--data-parallel-size": "the number of started processes",
    "--datasets": "--input",
    "--no-position-embedding": "--position-embedding-type none",
}

# Accepted flags: number of values, and why they have no effect here, which each run reports.
NO_EFFECT: dict[str, tuple[int, str]] = {
    "--DDP-impl": (1, "gradients are always in one flat buffer"),
    "--use-flash-attn": (0, "torch's attention picks the fastest kernel"),
    "--no-masked-softmax-fusion": (0, "no fused softmax kernel is compiled"),
    "--no-bias-dropout-fusion": (0, "no fusion changes the result here"),
    "--no-scale-tril-softmax-dropout-fusion": (0, "no fusion changes the result here"),
    "--multihead-attention-fusion": (0, "queries, keys and values are always one matrix"),
    "--no-query-key-layer-scaling": (0, "attention scores are float32, so no scaling is needed"),
    "--apply-query-key-layer-scaling": (0, "attention scores are float32, so no scaling is needed"),
    "--attention-softmax-in-fp32": (0, "the softmax is always float32"),
    "--accumulate-allreduce-grads-in-fp32": (0, "gradients are always accumulated in float32"),
    "--no-gradient-accumulation-fusion": (0, "gradients are always accumulated in float32, in place"),
    "--no-async-tensor-model-parallel-allreduce": (0, "the collectives are chosen by the layout"),
    "--no-contiguous-buffers-in-local-ddp": (0, "gradients are always in one flat buffer"),
    "--no-persist-layer-norm": (0, "torch's layer norm is always used"),
    "--no-scatter-gather-tensors-in-pipeline": (0, "how stages send activations changes no result"),
    "--use-cpu-initialization": (0, "weights are always drawn on the CPU, for any layout"),
    "--lazy-mpu-init": (1, "no outer program initialises anything"),
    "--empty-unused-memory-level": (1, "torch's allocator keeps its cache"),
    "--transformer-impl": (1, "there is one implementation, picked for the device"),
    "--no-data-sharding": (0, "samples are read in one order for any ranks"),
    "--use-rdma": (0, "NCCL finds InfiniBand"),
    "--no-initialization": (0, "weights are always initialised"),
    "--no-barrier-with-level-1-timing": (0, "timers wait for their own device"),
    "--distribute-saved-activations": (0, "--sequence-parallel splits activations over tensor ranks"),
    "--standalone-embedding-stage": (0, "--pipeline-layout can give the first stage fewer layers"),
    "--overlap-p2p-communication": (0, "how stages send activations changes no result"),
    "--use-ring-exchange-p2p": (0, "how stages send activations changes no result"),
    "--no-pipeline-parallel": (0, "with one stage there is no pipeline"),
    "--adlr-autoresume": (0, "it asks a service of NVIDIA's cluster; SIGTERM saves and exits"),
    "--adlr-autoresume-interval": (1, "it asks a service of NVIDIA's cluster; SIGTERM saves and exits"),
    "--codecarbon-dir": (1, "energy is not measured; run codecarbon separately"),
    "--inference-batch-times-seqlen-threshold": (1, "generation has no pipeline to fill"),
    "--max-tokens-to-oom": (1, "generation allots its memory before it starts"),
    "--contigious-checkpointing": (0, "DeepSpeed's memory layout, which changes no result"),
    "--checkpoint-in-cpu": (0, "DeepSpeed's memory layout, which changes no result"),
    "--synchronize-each-layer": (0, "DeepSpeed's scheduling, which changes no result"),
    "--profile-backward": (0, "DeepSpeed's own timer"),
    "--zero-reduce-scatter": (0, "the collectives are chosen by the layout"),
    "--zero-contigious-gradients": (0, "gradients are always in one flat buffer"),
    "--zero-reduce-bucket-size": (1, "one bucket is one block of the model"),
    "--zero-allgather-bucket-size": (1, "one bucket is one block of the model"),
    "--fp16-lm-cross-entropy": (0, "the loss reads half-precision logits and always sums in float32"),
    "--cross-entropy-loss-fusion": (0, "the loss is always fused"),
    "--no-load-rng": (0, "randomness is a function of seed and sample number: there is no state"),
    "--no-save-rng": (0, "randomness is a function of seed and sample number: there is no state"),
    "--use-pin-memory": (0, "batches are always pinned on a GPU"),
    "--scattered-embeddings": (0, "DeepSpeed's memory layout, which changes no result"),
    "--split-transformers": (0, "DeepSpeed's memory layout, which changes no result"),
    "--memory-centric-tiled-linear": (0, "DeepSpeed's memory layout, which changes no result"),
    "--tile-factor": (1, "DeepSpeed's memory layout, which changes no result"),
    "--ctrl-port": (1, "torchrun's rendezvous port is used"),
    "--log": (1, "the log is standard output; figures are in metrics.jsonl of --run-dir"),
    "--metric-print-format": (1, "there is one log line; metrics.jsonl is for programs"),
    "--save-last": (0, "the last step is always saved"),
    "--profile-transformer-layer": (0, "OneFlow's own profiler"),
    # Newer Megatron-LM
    "--use-mcore-models": (0, "there is one model"),
    "--use-legacy-models": (0, "there is one model"),
    "--attention-backend": (1, "torch's attention picks the fastest kernel"),
    "--overlap-grad-reduce": (0, "communication is always overlapped"),
    "--overlap-param-gather": (0, "communication is always overlapped"),
    "--tp-comm-overlap": (0, "communication is overlapped where it can be"),
    "--no-create-attention-mask-in-dataloader": (0, "masks are always made on the device"),
    "--num-dataset-builder-threads": (1, "sample indices are built in one go"),
    "--manual-gc": (0, "a run's long-lived objects are always hidden from Python's collector"),
    "--manual-gc-interval": (1, "a run's long-lived objects are always hidden from Python's collector"),
    "--use-dist-ckpt": (0, "every rank always writes its part"),
    "--auto-detect-ckpt-format": (0, "formats are always recognised"),
    "--ckpt-fully-parallel-save": (0, "every rank always writes its part"),
    "--no-ckpt-fully-parallel-save": (0, "every rank always writes its part"),
    "--partitions": (1, "workers share one input and write one pair of files, in the order of the input"),
    # Flags of training on which the files of `preprocess` do not depend
    "--make-vocab-size-divisible-by": (1, "the files hold true ids; padding belongs to training"),
    "--pad-vocab-size-to": (1, "the files hold true ids; padding belongs to training"),
}

# Unplanned flags, whose absence would change the result: refused, by reason.
REFUSED = {
    "--use-torch-fsdp2": "it is --zero-stage 3 here",
    "--data-parallel-sharding-strategy": "it is --zero-stage here",
    "--data-parallel-random-init": "weights are a function of seed and name, for any number of ranks",
    "--use-bnb-optimizer": "8-bit optimizer state is not planned; see --optimizer",
    "--use-external-dataset": "data is .bin/.idx; see --data-path",
    "--fp8": "8-bit training is not yet there; --bf16 is",
    **dict.fromkeys(
        """--nproc_per_node --nnodes --node_rank --master_addr --master_port --nproc-per-node --node-rank --master-addr
        --master-port --hostfile --include --num_gpus""".split(),
        "it belongs to the launcher; put it before the script's name",
    ),
}

# First letters of flags for models other than GPT: refused, by their purpose.
OTHER_MODELS = {
    "BERT": "bert mask-prob short-seq-prob classes-fraction data-per-class-fraction onnx-safe output-bert",
    "retrieval models": "biencoder ict retriever indexer evidence-data titles-data block-data embedding-path "
    "query-in-block use-one-sent-docs retro head-lr-mult",
    "vision models": "dino swin vision img- patch-dim num-channels num-classes mask-type mask-factor iter-per-epoch "
    "sample-rate",
    "encoder-decoder models": "decoder- encoder-num-layers vocab-extra-ids pipeline-model-parallel-split",
    "FP8 through Transformer Engine": "fp8- no-fp8-",
}


def known_elsewhere(name: str) -> str | None:
    """Return the answer to a flag that is known only in other programs."""
    if name in RETIRED:
        return f"{name} is no longer valid; use {RETIRED[name]}"
    if name in REFUSED:
        return f"{name} is refused: {REFUSED[name]}"
    for model, starts in OTHER_MODELS.items():
        if name.startswith(tuple("--" + s for s in starts.split())):
            return f"{name} is for {model}; Meshwright pre-trains GPT"
    return None
