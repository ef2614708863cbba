"""Double of GenerationMixin for packed rows, the GPT attention plugin and a paged cache."""

from __future__ import annotations

import math
from collections import OrderedDict

import tensorrt as trt

from ..bindings import KVCacheType
from ..functional import Tensor
from ..layers import SpecDecodingParams
from ..mapping import Mapping
from ..plugin.plugin import current_all_reduce_helper


def _range(largest, smallest=1):
    return [smallest, (largest + smallest) // 2, largest]


class GenerationMixin:
    @staticmethod
    def has_ctx_gen_opt_profiles(
        use_gpt_attention_plugin=False,
        use_gemm_plugin=False,
        use_mamba_conv1d_plugin=False,
        remove_input_padding=False,
        paged_state=False,
        kv_cache_type=KVCacheType.CONTINUOUS,
    ):
        if use_gpt_attention_plugin and use_gemm_plugin:
            return False
        packed = remove_input_padding and use_gpt_attention_plugin
        return not (packed and kv_cache_type in (KVCacheType.PAGED, KVCacheType.DISABLED))

    @staticmethod
    def get_profiles_ranges(
        *,
        max_batch_size,
        max_beam_width,
        max_input_len,
        max_num_tokens,
        max_draft_len,
        opt_batch_size,
        opt_num_tokens,
        enable_ctx_gen_opt_profiles,
        multiple_profiles,
        kv_cache_type=KVCacheType.CONTINUOUS,
    ):
        assert not enable_ctx_gen_opt_profiles
        count = 2 if multiple_profiles else 1
        rows = _range(max_batch_size * max_beam_width)
        tokens = max_draft_len + 1
        return count, {
            "bb_range": [rows] * count,
            "bbd_range": [[rows[0], rows[1] * tokens, rows[2] * tokens]] * count,
            "num_tokens_range": [[1, opt_num_tokens or max_batch_size, max_num_tokens]] * count,
        }

    def prepare_basic_inputs(
        self,
        *,
        max_batch_size,
        max_beam_width,
        max_input_len,
        max_seq_len,
        max_num_tokens,
        hidden_size,
        num_kv_heads,
        head_size,
        num_layers,
        kv_dtype,
        kv_cache_type,
        remove_input_padding=False,
        use_gpt_attention_plugin=False,
        use_gemm_plugin=False,
        tokens_per_block=32,
        gather_context_logits=False,
        dtype=None,
        num_heads=None,
        mapping=None,
        opt_num_tokens=None,
        max_draft_len=0,
        speculative_decoding_draft_tokens_external=False,
        multiple_profiles=False,
    ):
        assert remove_input_padding and use_gpt_attention_plugin
        assert kv_cache_type is KVCacheType.PAGED and max_beam_width == 1
        mapping = mapping or Mapping()
        count, ranges = self.get_profiles_ranges(
            max_batch_size=max_batch_size,
            max_beam_width=max_beam_width,
            max_input_len=max_input_len,
            max_num_tokens=max_num_tokens,
            max_draft_len=max_draft_len,
            opt_batch_size=None,
            opt_num_tokens=opt_num_tokens,
            enable_ctx_gen_opt_profiles=False,
            multiple_profiles=multiple_profiles,
            kv_cache_type=kv_cache_type,
        )
        make = _Maker(count)
        tokens, rows = ranges["num_tokens_range"], ranges["bb_range"]
        made = {"input_ids": make("input_ids", num_tokens=tokens)}
        low = [[math.ceil(t[0] / (max_draft_len + 1)), *t[1:]] for t in tokens]
        made["position_ids"] = make("position_ids", position_ids_num_tokens_range=low)
        if mapping.tp_size > 1:
            current_all_reduce_helper().set_workspace_tensor(mapping, count)
        made["last_token_ids"] = None
        if not gather_context_logits:
            made["last_token_ids"] = make(
                "last_token_ids", batch_size_last_token_ids=ranges["bbd_range"]
            )
        made["spec_decoding_params"] = None
        if max_draft_len > 0 and not speculative_decoding_draft_tokens_external:
            made["spec_decoding_params"] = _tree(make, count, max_batch_size, max_draft_len, rows)
        for name in (
            "sequence_length",
            "host_request_types",
            "host_past_key_value_lengths",
            "context_lengths",
            "host_context_lengths",
        ):
            made[name] = make(name, batch_size_beam_width=rows)
        blocks = [[math.ceil(x / tokens_per_block) for x in _range(max_seq_len)]] * count
        for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
            made[name] = make(
                name,
                num_kv_cache_pools=[1] * count,
                batch_size_beam_width=rows,
                kv=[2] * count,
                max_blocks_per_seq=blocks,
            )
        made["host_kv_cache_pool_pointers"] = make(
            "host_kv_cache_pool_pointers",
            trt.int64,
            num_pools_layers=[1] * count,
            num_pools_kv=[2] * count,
        )
        made["host_kv_cache_pool_mapping"] = make(
            "host_kv_cache_pool_mapping",
            pools_mapping=[num_layers] * count,
            layer_cache_pool_locator=[2] * count,
        )
        made["cache_indirection"] = make(
            "cache_indirection",
            batch_size_cache=[_range(max_batch_size)] * count,
            beam_width=[_range(1)] * count,
            max_seq_len=[_range(max_seq_len)] * count,
        )
        made["host_max_attention_window_sizes"] = make(
            "host_max_attention_window_sizes", num_layers=[num_layers] * count
        )
        made["host_sink_token_length"] = make("host_sink_token_length", scalar=[1] * count)
        made["host_runtime_perf_knobs"] = make(
            "host_runtime_perf_knobs", trt.int64, perf_knob_size=[16] * count
        )
        made["host_context_progress"] = make(
            "host_context_progress", trt.int64, context_progress_size=[1] * count
        )
        made["past_key_value"] = [None] * num_layers
        return made


class _Maker:
    def __init__(self, count):
        self.count = count

    def __call__(self, name, dtype=trt.int32, **ranges):
        shape = [x[0] if isinstance(x[0], int) else -1 for x in ranges.values()]
        return Tensor(name=name, dtype=dtype, shape=shape, dim_range=OrderedDict(ranges))


def _tree(make, count, max_batch_size, max_draft_len, rows):
    tokens = max_draft_len + 1
    zero = [[0, *row[1:]] for row in rows]
    return SpecDecodingParams(
        spec_decoding_max_generation_length=tokens,
        spec_decoding_generation_lengths=make(
            "spec_decoding_generation_lengths", batch_size_beam_width_0=zero
        ),
        spec_decoding_position_offsets=make(
            "spec_decoding_position_offsets",
            batch_size_beam_width_0=zero,
            spec_decoding_position_ids_dim0=[[1, tokens, tokens]] * count,
        ),
        spec_decoding_packed_mask=make(
            "spec_decoding_packed_mask",
            spec_decoding_packed_mask_dim0=[_range(max_batch_size * tokens, 0)] * count,
            spec_decoding_packed_mask_dim1=[[0, 1, math.ceil(tokens / 32)]] * count,
        ),
        spec_decoding_use=make("spec_decoding_use", spec_decoding_use_dim=[1] * count),
    )
