"""DeepSeek-V4: where upstream runs a replaceable op, and what a kernel is given there."""

from opslot_patchgen import CallGuard, EntryGuard, ForwardGuard, ModelSpec, RegionGuard, Slot

from ._decoder import RUNS_SPARSE, SPARSE, causal_loss, load_balancing_loss, rms_norm, unweighted_norm

SPEC = ModelSpec(
    family="deepseek_v4",
    source="transformers.models.deepseek_v4.modeling_deepseek_v4",
    guards=(
        rms_norm("DeepseekV4", "fp32_weight", since=("5.24", "it multiplies by the weight after rounding")),
        unweighted_norm("DeepseekV4"),
        EntryGuard(
            target="DeepseekV4MLP.forward",
            slot=Slot("glu", "swiglu_clamped", activation="act_fn"),
            result="self.down_proj(kernel(self.gate_proj(x), self.up_proj(x), self.limit))",
        ),
        ForwardGuard(
            target="DeepseekV4Experts",
            slot=Slot("moe_experts", "clamped", activation="act_fn", check="opslot_models.adoption:experts_obstacle"),
            attributes=("gate_up_proj", "down_proj", "limit"),
        ),
        EntryGuard(
            target="DeepseekV4Indexer.forward",
            slot=Slot("dsa_indexer", "deepseek_v4"),
            before="self.scorer",
            result="kernel(q, compressed_kv, self.scorer.weights_proj(hidden_states), position_ids, "
            "self.compress_rate, self.index_topk)",
        ),
        RegionGuard(
            target="DeepseekV4Attention.forward",
            slot=Slot("dsa_attention", "deepseek_v4", check="opslot_models.adoption:sparse_obstacle"),
            first="ALL_ATTENTION_FUNCTIONS.get_interface",
            last="attention_interface",
            operand=False,
            arguments=("q", "kv", "self.sinks", "keys_in_mask(self, attention_mask, q.shape[0])", "self.scaling"),
            result="attn_output",
            cleared=("attn_weights",),
            when=SPARSE,
            uses=(*RUNS_SPARSE, "opslot_models.adoption:keys_in_mask"),
        ),
        EntryGuard(
            target="DeepseekV4HyperConnection.forward",
            slot=Slot("mhc", "pre"),
            result="kernel(hidden_streams, self.fn, self.scale, self.base, self.input_norm.eps, "
            "self.hc_sinkhorn_iters, self.hc_eps)",
        ),
        EntryGuard(
            target="DeepseekV4HyperHead.forward",
            slot=Slot("mhc", "head"),
            result="kernel(x, self.hc_fn, self.hc_scale, self.hc_base, self.input_norm.eps, self.eps)",
        ),
        CallGuard(
            target="DeepseekV4DecoderLayer.forward",
            slot=Slot("mhc", "post"),
            call="attn_output.unsqueeze",
            result="kernel(attn_output.to(dtype), hidden_states, post, comb)",
        ),
        EntryGuard(
            target="DeepseekV4DecoderLayer.forward",
            slot=Slot("mhc", "post"),
            before="mlp_output.unsqueeze",
            result="kernel(mlp_output.to(dtype), hidden_states, post, comb)",
        ),
        load_balancing_loss("DeepseekV4"),
        causal_loss("DeepseekV4"),
    ),
    unguarded=(
        ("DeepseekV4Attention.forward", "rotates: neighbours stay neighbours, in the last part of one tensor"),
        ("DeepseekV4CSACompressor.forward", "compresses: windows with buffers and a cache"),
        ("DeepseekV4HCACompressor.forward", "compresses: windows with buffers and a cache"),
    ),
    untrained=("DeepseekV4Indexer",),
    whole=("DeepseekV4HyperConnection", "DeepseekV4HyperHead"),
)
