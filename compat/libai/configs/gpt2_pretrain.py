"""A small GPT-2: 6 layers, 16 heads, hidden size 384."""

from .common.data.gpt_dataset import dataloader, tokenization  # noqa: F401
from .common.models.gpt import pretrain_model as model
from .common.models.graph import graph  # noqa: F401
from .common.optim import optim
from .common.train import train

model.cfg.update(
    num_layers=6, num_attention_heads=16, embedding_dropout_prob=0.1, attention_dropout_prob=0.1
)
optim.lr = 1.5e-4
train.dist.pipeline_num_layers = model.cfg.num_layers
train.train_micro_batch_size = 4
train.amp.enabled = True
train.evaluation.eval_iter = 10
train.output_dir = "./output/gpt2_output"
