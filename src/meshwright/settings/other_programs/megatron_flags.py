"""Answers to flags of Megatron-LM, Megatron-Core and their descendants that Meshwright lacks.

A flag is accepted without effect only if the result of a training does not depend on it; all
others are refused with the reason, or do the same as one of ours.
"""

from __future__ import annotations

RETIRED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--data-parallel-size": "the number of started processes",
    "--datasets": "--input",
    "--no-position-embedding": "--position-embedding-type none",
}

# Switches that are one of our settings with a value.
EQUAL = {
    "--calculate-per-token-loss": ("loss_mean", "global"),
    "--fp8-e4m3": ("fp8_format", "e4m3"),
    "--fp8-hybrid": ("fp8_format", "hybrid"),
    "--enable-cuda-graph": ("cuda_graphs", "on"),
    "--external-cuda-graph": ("cuda_graphs", "on"),
}

# Older switches for a setting with a value. A file or a saved run may hold them too.
OLD_SWITCHES = {
    "checkpoint_activations": ("recompute_granularity", "full"),
    "deepspeed_activation_checkpointing": ("recompute_granularity", "full"),
    "recompute_activations": ("recompute_granularity", "selective"),
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "openai_gelu": ("bias_gelu_fusion", True),
    "use_distributed_optimizer": ("zero_stage", 1),  # a higher stage includes it
}

# Reason -> accepted flags, each with its number of values (none: a switch; *: any number).
_IDLE = {
    "gradients lie in flat buffers, which are summed block by block": """DDP-impl:1
        no-contiguous-buffers-in-local-ddp zero-contigious-gradients ddp-num-buckets:1 ddp-bucket-size:1
        ddp-pad-buckets-for-high-nccl-busbw""",
    "the loss is divided before the backward pass, so gradients are only summed": "no-gradient-reduce-div-fusion",
    "ZeRO 3 is torch's fully_shard, which manages its buffers": """fsdp-double-buffer fsdp-manual-registration
        suggested-communication-unit-size:1""",
    "models are always built on the meta device": "init-model-with-meta-device",
    "gradients are always accumulated in float32": "accumulate-allreduce-grads-in-fp32",
    "gradients are always accumulated in float32, in place": """no-gradient-accumulation-fusion
        ddp-reduce-scatter-with-fp32-accumulation ddp-average-in-collective""",
    "one bucket is one block of the model": "zero-reduce-bucket-size:1 zero-allgather-bucket-size:1",
    "torch's attention picks the fastest kernel": "use-flash-attn attention-backend:1",
    "no fused softmax kernel is compiled": "no-masked-softmax-fusion",
    "no fusion changes the result here": """no-bias-dropout-fusion no-scale-tril-softmax-dropout-fusion no-rope-fusion
        no-bias-swiglu-fusion use-fused-weighted-squared-relu use-te-activation-func disable-jit-fuser""",
    "queries, keys and values are always one matrix": "multihead-attention-fusion",
    "attention scores are float32, so no scaling is needed": """no-query-key-layer-scaling
        apply-query-key-layer-scaling""",
    "the softmax is always float32": "attention-softmax-in-fp32",
    "torch's layer norm is always used": "no-persist-layer-norm",
    "the loss is always fused": "cross-entropy-loss-fusion cross-entropy-fusion-impl:1",
    "the loss reads half-precision logits and always sums in float32": "fp16-lm-cross-entropy",
    "there is one implementation, picked for the device": "transformer-impl:1",
    "there is one model": "use-mcore-models use-legacy-models",
    "no feature is behind this switch": "enable-experimental",
    "--cuda-graphs decides; a graph holds a whole step": """cuda-graph-impl:1 cuda-graph-scope:*
        cuda-graph-warmup-steps:1""",
    "the collectives are chosen by the layout": """no-async-tensor-model-parallel-allreduce zero-reduce-scatter
        no-clone-scatter-output-in-embedding create-all-gather-group""",
    "communication is always overlapped": """overlap-grad-reduce overlap-param-gather
        overlap-param-gather-with-optimizer-step no-align-grad-reduce no-align-param-gather""",
    "--tp-overlap decides; which communication is overlapped changes no result": """
        tp-comm-overlap tp-comm-overlap-cfg:1 disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
        tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag
        disable-tp-comm-split-rs no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-bulk-dgrad
        no-tp-comm-bulk-wgrad no-tp-comm-split-ag no-tp-comm-split-rs tp-comm-bootstrap-backend:1
        delay-wgrad-compute defer-embedding-wgrad-compute wgrad-deferral-limit:1""",
    "how stages send activations changes no result": """no-scatter-gather-tensors-in-pipeline overlap-p2p-communication
        no-overlap-p2p-communication overlap-p2p-communication-warmup-flush use-ring-exchange-p2p
        microbatch-group-size-per-virtual-pipeline-stage:1 pipeline-model-parallel-comm-backend:1""",
    "with one stage there is no pipeline": "no-pipeline-parallel",
    "NCCL finds InfiniBand": "use-rdma",
    "NCCL's own variables (NCCL_*) set this": """use-nccl-ub disable-symmetric-registration use-sharp
        sharp-enabled-group:1 nccl-communicator-config-path:1""",
    "collectives run on torch's own streams": "high-priority-stream-groups:*",
    "torch's recorder is set by its own variables (TORCH_FR_*, TORCH_NCCL_*)": """flight-recorder-dump-path:1
        flight-recorder-trace-buffer-size:1 no-flight-recorder-dump-on-timeout flight-recorder-include-stack-trace
        no-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec""",
    "no result depends on the order of ranks": "use-tp-pp-dp-mapping",
    "groups of gloo are made where they are needed": "disable-gloo-process-groups",
    "--distributed-timeout-minutes holds for the whole run": "distributed-timeout-seconds-after-init:1",
    "weights are always drawn on the CPU, for any layout": "use-cpu-initialization",
    "weights are always drawn or loaded": "no-initialization",
    "no outer program initialises anything": "lazy-mpu-init:1",
    "torch's allocator keeps its cache": "empty-unused-memory-level:1",
    "a run's long-lived objects are always hidden from Python's collector": """manual-gc manual-gc-interval:1
        no-manual-gc-eval""",
    "the CPU never runs more than a step ahead": "train-sync-interval:1",
    "samples are read in one order for any ranks": "no-data-sharding",
    "masks are always made on the device": "no-create-attention-mask-in-dataloader",
    "sample indices are built in one go": """num-dataset-builder-threads:1 dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap per-dataset-sequences-path:1""",
    "token files are always mapped, which reads the same ids": "no-mmap-bin-files",
    "token files hold no padding": "allow-ambiguous-pad-tokens",
    "batches are always pinned on a GPU": "use-pin-memory",
    "data are local files; there is no storage client": "disable-msc",
    "no validation loss depends on the micro-batch": "eval-micro-batch-size:1",
    "randomness is a function of seed and sample number: there is no state": """no-load-rng no-save-rng te-rng-tracker
        inference-rng-tracker""",
    "--sequence-parallel splits activations over tensor ranks": "distribute-saved-activations partition-activations",
    "--recompute-granularity selective recomputes attention": "recompute-modules:*",
    "--pipeline-layout can give the first stage fewer layers": "standalone-embedding-stage",
    "--cpu-optimizer keeps all of the optimizer in host memory": """optimizer-offload-fraction:1
        use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params""",
    "every non-finite loss or gradient is found; see --on-nonfinite": """check-for-nan-in-loss-and-grad
        no-check-for-nan-in-loss-and-grad no-check-for-nan-in-loss""",
    "a loss far above the recent ones is reported; see --on-spike": "check-for-spiky-loss",
    "a step that is not finite is computed again; see --on-nonfinite": """rerun-mode:1
        result-rejected-tracker-filename:1""",
    "the log line has TFLOPs and tokens per second": """log-throughput log-throughput-to-tensorboard
        throughput-window-size:1""",
    "metrics.jsonl in the run's folder has tokens, time and gradient norm of every step": """log-progress
        log-l2-norm-grad-to-tensorboard log-runtime-to-tensorboard runtime-time-unit:1""",
    "config.toml in the run's folder holds every setting": "config-logger-dir:1 save-config-filepath:1",
    "slow ranks are named all along, at log intervals; see --log-straggler": """disable-straggler-on-startup
        straggler-ctrlr-port:1 straggler-minmax-count:1""",
    "it is not measured; --timing-log-level compares the ranks' times": """gpu-sniff-test-interval:1
        run-workload-inspector-server""",
    "energy is not measured; run codecarbon separately": "codecarbon-dir:1 log-energy",
    "this figure is not measured": "log-max-attention-logit",
    "the log line has the peak memory of the device": "log-memory-interval:1 log-device-memory-used",
    "timers wait for their own device": "no-barrier-with-level-1-timing",
    "notes go to stderr, the log to stdout": """logging-level:1 filter-warnings no-filter-warnings modules-to-filter:*
        set-level-for-all-loggers""",
    "--profile is torch's profiler, of the first rank": """use-pytorch-profiler profile-ranks:*""",
    "--profile records the time of operations alone": """record-memory-history memory-snapshot-path:1 record-shapes
        nvtx-ranges pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
        profile-transformer-layer profile-backward""",
    "it is a service of NVIDIA's own": """no-one-logger one-logger-project:1 one-logger-run-name:1 one-logger-async
        app-tag-run-name:1 app-tag-run-version:1 enable-ft-package calc-ft-timeouts ft-num-warmup-iters:1""",
    "it asks a service of NVIDIA's cluster; SIGTERM saves and exits": "adlr-autoresume adlr-autoresume-interval:1",
    "SIGTERM and SIGINT always finish the step and save": """exit-signal-handler-for-dataloader
        exit-signal-handler-for-training""",
    "every rank always writes its part": """use-dist-ckpt ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo:1 ckpt-fully-parallel-save-process-group:1
        ckpt-fully-parallel-load-process-group:1 ckpt-fully-parallel-save-replicate-local
        ckpt-fully-parallel-load-replicate-local ckpt-assume-constant-structure dist-ckpt-save-pre-mcore-014
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient""",
    "formats are always recognised": """auto-detect-ckpt-format ckpt-convert-update-legacy-dist-opt-format
        universal-checkpoint""",
    "--deepspeed_config names the file that is read": "deepspeed",
    "a checkpoint must be complete, and is checked when it is read": """dist-ckpt-strictness:1
        no-ckpt-load-validate-sharding-integrity verify-integrity""",
    "--async-save decides alone": """async-strategy:1 use-persistent-ckpt-worker async-ckpt-cpu-priority:1
        async-ckpt-io-priority:1 async-ckpt-use-cpu-shm""",
    "master weights follow the loaded weights": "load-main-params-from-ckpt",
    "a run's folder always holds its tokenizer": "no-save-tokenizer-assets",
    "flags of the tokenizer win over the checkpoint's": "no-use-tokenizer-model-from-checkpoint-args",
    "the tokenizer runs no code of its files, and is always the fast one": """trust-remote-code legacy-tokenizer
        tokenizer-hf-use-fast""",
    "the last step is always saved": "save-last",
    "generation has no pipeline to fill": "inference-batch-times-seqlen-threshold:1",
    "generation allots its memory before it starts": "max-tokens-to-oom:1",
    "torch's allocator places what recomputation starts from": "contigious-checkpointing",
    "recomputation does not wait for the device": "synchronize-each-layer",
    "layers are recomputed whole, or their attention alone": "split-transformers",
    "--sequence-parallel splits the embedding's output over tensor ranks": "scattered-embeddings",
    "linear layers are not cut into tiles; --zero-stage 3 and tensor parallelism divide them": """
        memory-centric-tiled-linear tile-factor:1""",
    "torchrun's rendezvous port is used": "ctrl-port:1",
    "the log is standard output and log.txt of --run-dir; figures are in metrics.jsonl": "log:1",
    "it is for BERT's vocabulary": "do-lower-case do-chinese-wwm",
    "workers share one input and write one pair of files, in the order of the input": "partitions:1",
    # Flags of training on which the files of `preprocess` do not depend
    "the files hold true ids; padding belongs to training": """make-vocab-size-divisible-by:1 pad-vocab-size-to:1
        padded-vocab-size:1""",
}
_COUNTS: dict[str, int | str] = {"": 0, "1": 1, "*": "*"}
# Accepted flags: number of values, and why they have no effect here, which each run reports.
NO_EFFECT = {
    f"--{name}": (_COUNTS[count], reason)
    for reason, words in _IDLE.items()
    for name, _, count in (word.partition(":") for word in words.split())
}

# Reason -> refused flags, without which the result would be another; x-* are all that begin so.
_REFUSALS = {
    "it is --zero-stage 3 here": "use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward use-megatron-fsdp",
    "it is --zero-stage here": "data-parallel-sharding-strategy",
    "it is --num-distributed-optimizer-instances here": "outer-dp-sharding-strategy enable-full-sharding-in-hsdp",
    "weights are a function of seed and name, for any number of ranks": "data-parallel-random-init",
    "8-bit optimizer state is not planned; see --optimizer": "use-bnb-optimizer",
    "data is .bin/.idx; see --data-path": "use-external-dataset object-storage-cache-path",
    "it belongs to the launcher; put it before the script's name": """nproc_per_node nnodes node_rank master_addr
        master_port nproc-per-node node-rank master-addr master-port hostfile include num_gpus""",
    "it belongs to tools/launch_container.py, which starts a container; in one, give the flags of --cmd alone": """
        src py image wheel cmd extra-mount proxy no-interactive""",
    "give --fp8-format e4m3 or hybrid": "fp8",
    "all three products of a layer are 8-bit, with scales updated every step": "no-fp8-wgrad fp8-interval",
    "weights are kept in float32 and cast once a step": "fp8-param-gather",
    "this kind of 8-bit or 4-bit training is not supported; see --fp8-format": """fp4-* fp8-* no-fp8-*
        keep-fp8-transpose-cache te-precision-config-file reuse-grad-buf-for-mxfp8-param-ag kitchen-* use-kitchen*""",
    "mixtures of experts are not yet supported": """moe-* no-moe-* expert-model-parallel-size
        expert-tensor-parallel-size
        overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release save-tokens-per-expert-interval""",
    "this kind of attention is not yet supported; see --position-embedding-type and --num-query-groups": """
        multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale*
        cache-mla-latents original-max-position-embeddings beta-fast beta-slow experimental-attention-variant dsa-*
        no-dsa-* linear-* window-size window-attn-skip-freq softmax-type softmax-scale attention-output-gate
        qk-l2-norm qk-clip* relative-attention-* hca-*""",
    "rotary embeddings are the plain ones, of halves of a head; see --rotary-base and --rotary-percent": """
        rotary-interleaved rotary-seq-len-interpolation-factor rotary-scaling-factor use-rope-scaling
        rope-scaling-factor rope-type no-rope-freq mrope-section""",
    "this MLP is not supported; see --swiglu, --glu-activation and --squared-relu": """quick-geglu glu-linear-offset
        activation-func-clamp-value""",
    "prediction of several tokens is not supported": "mtp-*",
    "layers are all of one kind": """heterogeneous-* hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern
        hybrid-layer-pattern mamba-* no-mamba-* disable-mamba-mem-eff-path is-hybrid-model spec gated-norm*""",
    "embeddings are initialised like all weights; see --init-method-std": "embedding-init-method-std",
    "all parameters have one learning rate, --lr": "decoupled-lr decoupled-min-lr",
    "norms never decay": "apply-wd-to-qk-layernorm no-weight-decay-cond-type",
    "Muon is torch's: Nesterov, fused queries, keys and values, updates of AdamW's size": "muon-*",
    "optimizer state and gradients are float32": """use-precision-aware-optimizer main-grads-dtype main-params-dtype
        exp-avg-dtype exp-avg-sq-dtype no-store-param-remainders grad-reduce-in-bf16""",
    "torch's default holds for bfloat16 products": "disable-bf16-reduced-precision-matmul",
    "give --deterministic-mode": "batch-invariant-mode",
    "AdamW's decay is decoupled": "no-decoupled-weight-decay",
    "give --recompute-granularity full, with --checkpoint-in-cpu if that is not enough": """cpu-offloading*
        fine-grained-activation-offloading offload-modules min-offloaded-tensor-size""",
    "give the layers of each stage in --pipeline-layout": """decoder-first-pipeline-num-layers
        decoder-last-pipeline-num-layers num-layers-in-first-pipeline-stage num-layers-in-last-pipeline-stage
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split pipeline-model-parallel-layout""",
    "give --num-layers-per-virtual-pipeline-stage": "num-virtual-stages-per-pipeline-rank",
    "context is divided by --context-parallel-size in equal parts": """hierarchical-context-parallel-sizes
        hybrid-context-parallel max-seqlen-per-dp-cp-rank dynamic-context-parallel""",
    "the batch grows only by --rampup-batch-size": "step-batch-size-schedule decrease-batch-size-if-needed",
    "validation has the batches of training, every --eval-interval steps": """eval-global-batch-size
        start-eval-at-iter""",
    "Megatron's releases count it from 0 or from 1; give --skip-train-iteration-range A-B, from 1": """
        iterations-to-skip""",
    "only NaN and infinity are found in gradients; see --on-nonfinite": "check-for-large-grads",
    "it is for Megatron's own tests": "error-injection-rate error-injection-type test-mode fake-process-group",
    "a failed run starts again by meshwright launch --max-restarts": "inprocess-*",
    "name the step in --load, as DIR/iter_0001000": "ckpt-step",
    "give --load DIR --finetune": "pretrained-checkpoint",
    "a checkpoint loads in any layout; give the layout by flags": "use-mp-args-from-checkpoint-args",
    "give --ckpt-format": "dist-ckpt-format",
    "convert with meshwright convert": "ckpt-convert-format ckpt-convert-save no-strict-fsdp-dtensor-load",
    "give --save-interval, and --keep-last to limit the disk space": """non-persistent-* replication replication-jump
        replication-factor""",
    "inner values are not saved; see --log-params-norm and the Python interface": """save-params-interval
        save-activations-interval save-wgrads-interval save-dgrads-interval dump-param-to-param-group-map""",
    "give --blend-change-at on resume": "phase-transition-iterations",
    "a blend takes Megatron's 0.5 % more of each part": "mid-level-dataset-surplus",
    "the middle of texts is not trained": "fim-*",
    "set WANDB_ENTITY": "wandb-entity",
    "give --config FILE": "yaml-cfg",
    "give --preset; `meshwright presets` lists the sizes": "model_size model-size",
    "give --tokenizer, whose files say this": """tokenizer-metadata tokenizer-special-tokens tiktoken-*
        tokenizer-sentencepiece-* no-tokenizer-sentencepiece-* tokenizer-hf-* null-tokenizer-* no-pad-vocab-size""",
    "a template is for `meshwright chat` and `serve`, which have this flag": "chat-template",
    "Meshwright pre-trains; it has no reinforcement learning": """perform-rl-step rl-* no-rl-* grpo-* langrl-*
        no-langrl-* refit-method""",
    "Meshwright pre-trains on .bin/.idx files": "sft sft-*",
    "Meshwright has no server; see meshwright generate": """inference-* no-inference-* flash-decode
        use-legacy-static-engine decode-only-cuda-graphs symmetric-ar-type nccl-all-reduce-for-prefill
        mlp-chunks-for-prefill disable-chunked-prefill enable-chunked-prefill""",
}
REFUSED = {f"--{word}": reason for reason, words in _REFUSALS.items() for word in words.split()}

# First letters of flags for models other than GPT: refused, by their purpose.
OTHER_MODELS = {
    "BERT": "bert mask-prob short-seq-prob classes-fraction data-per-class-fraction onnx-safe output-bert",
    "retrieval models": "biencoder ict retriever indexer evidence-data titles-data block-data embedding-path "
    "query-in-block use-one-sent-docs retro head-lr-mult",
    "vision models": "dino swin vision img- patch-dim num-channels num-classes mask-type mask-factor iter-per-epoch "
    "sample-rate",
    "encoder-decoder models": "decoder- encoder-num-layers vocab-extra-ids pipeline-model-parallel-split",
}


def known_elsewhere(name: str) -> str | None:
    """Return the answer to a flag that is known only in other programs."""
    if name in RETIRED:
        return f"{name} is no longer valid; use {RETIRED[name]}"
    begins = (reason for word, reason in REFUSED.items() if word.endswith("*") and name.startswith(word[:-1]))
    if reason := REFUSED.get(name) or next(begins, None):
        return f"{name} is refused: {reason}"
    for model, starts in OTHER_MODELS.items():
        if name.startswith(tuple("--" + s for s in starts.split())):
            return f"{name} is for {model}; Meshwright pre-trains GPT"
    return None
