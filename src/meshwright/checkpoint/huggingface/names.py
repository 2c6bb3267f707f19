"""Names of parameters in transformers' networks, under ours; read in both directions."""

# Outside the layers, below "transformer.", "model." and "gpt_neox.".
GPT2_OUTSIDE = {"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"}
LLAMA_OUTSIDE = {"wte": "embed_tokens", "ln_f": "norm"}
NEOX_OUTSIDE = {"wte": "embed_in", "ln_f": "final_layer_norm"}
HEAD = "lm_head"
NEOX_HEAD = "embed_out"

# In a layer. GPT-2's linear weights are [in, out].
GPT2_LINEAR = {
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
GPT2_NORMS = {"ln_1": "ln_1", "ln_2": "ln_2"}
LLAMA_LINEAR = {"attn.proj": "self_attn.o_proj", "mlp.proj": "mlp.down_proj"}
LLAMA_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # joined in our attn.qkv
LLAMA_GATES = ("mlp.gate_proj", "mlp.up_proj")  # the halves of our mlp.fc
LLAMA_NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
LLAMA_NORMS |= {"attn.ln_q": "self_attn.q_norm", "attn.ln_k": "self_attn.k_norm"}
NEOX_LAYER = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
NEOX_LAYER |= {"attn.qkv": "attention.query_key_value", "attn.proj": "attention.dense"}
NEOX_LAYER |= {"mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}
