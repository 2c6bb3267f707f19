"""Names of parameters in transformers' GPT-2 and Llama, under ours; read in both directions."""

# Outside the layers, below "transformer." and "model.".
GPT2_OUTSIDE = {"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"}
LLAMA_OUTSIDE = {"wte": "embed_tokens", "ln_f": "norm"}
HEAD = "lm_head"

# In a layer. GPT-2's linear weights are [in, out].
GPT2_LINEAR = {"attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj"}
GPT2_NORMS = {"ln_1": "ln_1", "ln_2": "ln_2"}
LLAMA_LINEAR = {"attn.proj": "self_attn.o_proj", "mlp.proj": "mlp.down_proj"}
LLAMA_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # joined in our attn.qkv
LLAMA_GATES = ("mlp.gate_proj", "mlp.up_proj")  # the halves of our mlp.fc
LLAMA_NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
LLAMA_NORMS |= {"attn.ln_q": "self_attn.q_norm", "attn.ln_k": "self_attn.k_norm"}
