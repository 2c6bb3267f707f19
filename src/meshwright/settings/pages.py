"""What the help shows first: each command's common flags and examples.

Flags are named by their fields. Commands whose flags fit two screens need no list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Commands that `launch` starts as several ranks.
LAUNCHED = ("train", "verify-layout", "preprocess", "evaluate", "generate", "chat", "serve")


@dataclass(frozen=True)
class Page:
    """A command's configuration, and the first screens of its help."""

    config: str  # module and class, imported when needed
    positional: str | None = None  # the field that words without a flag set
    common: dict[str, str] = field(default_factory=dict)  # heading: names of fields
    examples: tuple[str, ...] = ()
    settings: str = "config_file print_config dry_run"  # the last heading


_SAMPLES = {
    "Data": "data_path train_data_path valid_data_path split seq_length seed",
    "Length and batches": "train_iters global_batch_size eval_interval eval_iters",
    "Tokenizer": "tokenizer",
}
PAGES = {
    "train": Page(
        "meshwright.settings.schema:TrainConfig",
        None,
        {
            "Data": "data_path tokenizer",
            "Model": "preset num_layers hidden_size num_attention_heads seq_length",
            "Training": "train_iters micro_batch_size global_batch_size lr lr_decay_style lr_warmup_iters",
            "Speed": "bf16 device tensor_model_parallel_size zero_stage",
            "Checkpoints": "save load save_interval",
        },
        (
            "meshwright train --preset gpt2-117m --data-path corpus_text_document \\\n      --save run --load run",
            "meshwright train --config run/config.toml",
        ),
        settings="config_file dry_run",
    ),
    "verify-layout": Page(
        "meshwright.settings.schema:TrainConfig",
        None,
        {
            "Layout": "tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size "
            "num_layers_per_virtual_pipeline_stage pipeline_schedule context_parallel_size zero_stage world_size",
            "Model": "preset num_layers hidden_size num_attention_heads seq_length",
            "Comparison": "verify_layout run_dir device",
        },
        (
            "meshwright verify-layout --tensor-model-parallel-size 2 --zero-stage 1",
            "meshwright verify-layout --config run/config.toml --world-size 8",
            "meshwright launch --nproc-per-node 8 verify-layout --config run/config.toml",
        ),
        settings="config_file",
    ),
    "generate": Page(
        "meshwright.settings.schema:GenerateConfig",
        "load",
        {
            "Text": "prompt prompts output json num_return_sequences out_seq_length stop",
            "Choice of tokens": "greedy temperature top_k top_p seed beam_width",
            "Model": "load tokenizer device bf16 micro_batch_size verify",
            "In Megatron's forms": "num_samples genfile",
        },
        (
            'meshwright generate run --prompt "Once upon a time" --top_k 40',
            "meshwright generate run --prompts prompts.jsonl --output texts.jsonl",
        ),
    ),
    "chat": Page(
        "meshwright.commands.chat:ChatConfig",
        "load",
        {
            "Dialogue": "system chat_template stop out_seq_length",
            "Choice of tokens": "greedy temperature top_k top_p min_p seed",
            "Model": "load tokenizer device bf16 verify",
        },
        ("meshwright chat run", "meshwright chat run --temperature 0.7 < questions.txt"),
    ),
    "serve": Page(
        "meshwright.commands.serve:ServeConfig",
        "load",
        {
            "Server": "host port api_key_file allowed_hosts served_model_name chat_template",
            "Limits": "slots queue max_body_size read_timeout request_timeout",
            "Model": "load tokenizer device bf16 seq_length verify",
        },
        ("meshwright serve run", "meshwright serve run --bf16 --slots 64 --port 8001"),
    ),
    "evaluate": Page(
        "meshwright.commands.evaluate:EvaluateConfig",
        "folders",
        {
            "Text": "input overlapping_eval",
            "Known tests": "eval_tasks task valid_data harness",
            "Model": "steps tokenizer device micro_batch_size",
            "Results": "json results_path picture",
        },
        (
            "meshwright evaluate run --input held-out.jsonl",
            "meshwright evaluate run --steps all --eval-tasks lambada=lambada_test.jsonl",
            "meshwright evaluate run --harness piqa,arc_easy",
        ),
    ),
    "preprocess": Page(
        "meshwright.settings.text_inputs:PreprocessConfig",
        None,
        {
            "Text": "input json_keys include exclude on_error",
            "Output": "output_prefix append_eod overwrite workers",
            "Tokenizer": "tokenizer vocab_file merge_file tokenizer_type",
        },
        ("meshwright preprocess --input texts --output-prefix corpus \\\n      --tokenizer tokenizer --append-eod",),
    ),
    "convert": Page(
        "meshwright.commands.convert:ConvertConfig",
        "paths",
        {
            "Target": "paths to dtype no_optimizer target_tensor_parallel_size target_pipeline_parallel_size",
            "What the source does not say": "num_attention_heads vocab_size tokenizer seq_length",
            "Reading": "verify trust_pickle",
        },
        (
            "meshwright convert run exported --to huggingface",
            "meshwright convert megatron-folder ours --to native --num-attention-heads 16",
        ),
    ),
    "data inspect": Page(
        "meshwright.commands.data:InspectConfig",
        "prefix",
        {"Part": "document sample sample_set top picture json"} | _SAMPLES,
        ("meshwright data inspect corpus_text_document --document 0",),
    ),
    "data index": Page(
        "meshwright.commands.data:IndexConfig", None, _SAMPLES, ("meshwright data index --config run/config.toml",)
    ),
    "data plan": Page(
        "meshwright.commands.data:PlanConfig",
        None,
        {"Format": "json"} | _SAMPLES,
        ("meshwright data plan --config run/config.toml",),
    ),
    "demo": Page("meshwright.commands.demo:DemoConfig", examples=("meshwright demo", "meshwright demo ~/demo")),
    "train-tokenizer": Page(
        "meshwright.commands.train_tokenizer:TrainTokenizerConfig",
        None,
        examples=("meshwright train-tokenizer --input texts --vocab-size 8192 \\\n      --output tokenizer",),
    ),
    "launch": Page(
        "meshwright.launch.launcher:LaunchConfig",
        None,
        examples=(
            "meshwright launch --nproc-per-node 8 train --config run/config.toml",
            "meshwright launch --nproc-per-node 8 --node-ips 10.0.0.1,10.0.0.2 train ...",
            "meshwright launch --write slurm --write-to run.sbatch --nnodes 2 \\\n      --nproc-per-node 8 train ...",
        ),
    ),
    "inspect": Page(
        "meshwright.commands.inspect:InspectCheckpointConfig",
        examples=("meshwright inspect run", "meshwright inspect run/iter_0001000 run/iter_0002000"),
    ),
    "watch": Page(
        "meshwright.commands.watch:WatchConfig",
        examples=("meshwright watch run", "meshwright watch run another-run --port 6500", "meshwright watch runs"),
    ),
    "report": Page(
        "meshwright.commands.report:ReportConfig",
        examples=(
            "meshwright report run",
            "meshwright report run another-run --output compare.html",
            "meshwright report --logs logs --table markdown --output speed.svg",
        ),
    ),
    "completion": Page(
        "meshwright.commands.completion:CompletionConfig",
        examples=(
            'eval "$(meshwright completion bash)"   # in ~/.bashrc',
            "meshwright completion zsh > DIR/_meshwright   # DIR is a folder of $fpath",
            "meshwright completion fish > ~/.config/fish/completions/meshwright.fish",
        ),
    ),
    "bench": Page(
        "meshwright.commands.bench:BenchConfig",
        examples=(
            "meshwright bench",
            "meshwright bench 345m sizes --rows 'dropout|1.3B' --peers",
            "meshwright bench gpt2-117m --data corpus_text_document --profile",
            "meshwright bench layouts --gpus 2 -- --compile off   # flags of train",
        ),
    ),
    "doctor": Page("meshwright.commands.doctor:DoctorConfig"),
    "presets": Page(
        "meshwright.commands.presets:PresetsConfig",
        examples=("meshwright presets", "meshwright presets gpt2-124m", "meshwright presets gpt2-124m --toml"),
    ),
    "quickstart": Page(
        "meshwright.commands.quickstart:QuickstartConfig",
        examples=("meshwright quickstart my-notes", "meshwright quickstart book.txt --minutes 20 --output book-model"),
    ),
    "data verify": Page(
        "meshwright.commands.data:VerifyConfig",
        "prefixes",
        {"Files": "prefixes checksums", "Tokenizer": "tokenizer vocab_size"},
        ("meshwright data verify corpus_text_document --checksums corpus.sha256",),
    ),
    "data merge": Page("meshwright.commands.data:MergeConfig", "datasets"),
    "data merge-json": Page("meshwright.commands.data:LooseTextConfig"),
    "data dedup": Page(
        "meshwright.commands.data:DedupConfig",
        "inputs",
        examples=("meshwright data dedup a.jsonl b.jsonl --output-file unique.jsonl",),
    ),
    "data fetch": Page("meshwright.commands.data:FetchConfig", "names"),
}
