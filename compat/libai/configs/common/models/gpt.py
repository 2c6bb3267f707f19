"""LiBai's defaults of a GPT. The number of layers has two names there, so a config gives it."""

from libai.config import LazyCall
from libai.models import GPTForPreTraining, GPTModel

cfg = dict(
    hidden_size=384,
    ffn_hidden_size=1536,
    num_attention_heads=12,
    max_seq_length=1024,
    vocab_size=30522,
)
cfg.update(embedding_dropout_prob=0, attention_dropout_prob=0, output_dropout_prob=0)
cfg.update(layernorm_epsilon=1e-5, initializer_range=0.02, use_scaled_init_for_output_weights=True)
cfg.update(
    bias_gelu_fusion=True,
    bias_dropout_fusion=True,
    scale_mask_softmax_fusion=True,
    amp_enabled=False,
)
cfg.update(apply_query_key_layer_scaling=True, apply_residual_post_layernorm=False)

gpt_model = LazyCall(GPTModel)(cfg=cfg)
pretrain_model = LazyCall(GPTForPreTraining)(cfg=cfg)
