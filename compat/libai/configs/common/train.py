"""LiBai's defaults of a training, with the evaluator of a GPT; a saving period of 0 is never."""

from libai.config import LazyCall
from libai.evaluation import PPLEvaluator
from libai.scheduler import WarmupCosineLR

train = dict(
    output_dir="./output", load_weight="", seed=1234, log_period=20, start_iter=0, warmup_ratio=0
)
train.update(
    train_micro_batch_size=32,
    global_batch_size=None,
    num_accumulation_steps=None,
    test_micro_batch_size=32,
)
train.update(
    train_iter=10000,
    train_epoch=0,
    train_samples=None,
    consumed_train_samples=0,
    consumed_valid_samples=0,
)
train.update(
    nccl_fusion_threshold_mb=16,
    nccl_fusion_max_ops=24,
    rdma_enabled=True,
    input_placement_device="cuda",
)
train.amp = train.activation_checkpoint = dict(enabled=False)
train.zero_optimization = dict(enabled=False, stage=1)
train.checkpointer = dict(period=5000, max_to_keep=100)
train.evaluation = dict(
    enabled=True, eval_period=5000, eval_iter=1e5, eval_metric="Acc@1", eval_mode="max"
)
train.evaluation.evaluator = LazyCall(PPLEvaluator)()
train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.001, alpha=0.01, warmup_method="linear")
train.dist = dict(
    data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_num_layers=None
)
train.dist.custom_pipeline_stage_id = None
