"""The benchmark's GPT: 24 layers, 16 heads, hidden size 1024."""

from .common.data.gpt_dataset import dataloader, tokenization
from .common.models.gpt import pretrain_model as model
from .common.optim import optim
from .common.train import train

tokenization.tokenizer.vocab_file = "gpt2-vocab.json"
tokenization.tokenizer.merges_file = "gpt2-merges.txt"
dataloader.train.dataset[0].indexed_dataset.data_prefix = "my-gpt2_text_document"
dataloader.train.dataset[0].max_seq_length = 1024

model.cfg.num_layers = 24
model.cfg.hidden_size = 1024
model.cfg.ffn_hidden_size = 4096
model.cfg.num_attention_heads = 16
model.cfg.max_seq_length = 1024
model.cfg.embedding_dropout_prob = 0.1
model.cfg.attention_dropout_prob = 0.1
optim.lr = 1.5e-4
train.dist.pipeline_num_layers = model.cfg.num_layers
# For four stages of equal size, in place of LiBai's own division:
# train.dist.custom_pipeline_stage_id = [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
train.test_micro_batch_size = 4
train.evaluation.eval_iter = 30
