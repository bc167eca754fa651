"""Cuts small models of many kinds, and says which have the bits of the whole model in stages.

    python -m tests.train.stages.kinds [KIND ...]

Each has four blocks and random weights, adapters on layers that it has, and is cut into two and
into four stages. Kinds that the tests cut (`test_stages`) are left out. Prints a line a kind: `same
bits`, why it is refused, or what went wrong.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model.settings import Lora
from examples.finetune import make_small
from tests.train.stages import test_stages as cutting

ENDS = ((2, 4), (1, 2, 3, 4))
# What is adapted where a model has it, three of these at most.
TARGETS = (
    *("q_proj", "o_proj", "down_proj", "out_proj", "in_proj", "c_attn", "query_key_value"),
    *("fc_out", "Wqkv", "qkv_proj"),
)
MIXED, SLIDING, FULL = (
    [first, second] * 2
    for first, second in (
        ("linear_attention", "full_attention"),
        ("sliding_attention", "full_attention"),
        ("full_attention", "full_attention"),
    )
)
LINEAR = {"layer_types": MIXED, "head_dim": 8, **cutting.LINEAR}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
SMALL = {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4}
GEMMA4 = {"head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 512}
OF_LAYERS = {"hidden_size_per_layer_input": 8, "layer_types": SLIDING}
# The configuration's class, and what it needs besides the usual sizes.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "bamba": ("Bamba", {"attn_layer_indices": [1, 3], **MAMBA}),
    "biogpt": ("BioGpt", {}),
    "bitnet": ("BitNet", {}),
    "codegen": ("CodeGen", SMALL),
    "cohere2": ("Cohere2", {}),
    "doge": ("Doge", {}),
    "dots1": ("Dots1", {"layer_types": FULL, "head_dim": 8, "n_shared_experts": 1, **ROUTED}),
    "ernie4.5": ("Ernie4_5", {}),
    "exaone4": ("Exaone4", {"layer_types": FULL}),
    "falcon-h1": ("FalconH1", {}),
    "flexolmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma4": (
        "Gemma4Text",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "gemma4-of-layers": ("Gemma4Text", {**GEMMA4, **OF_LAYERS, "num_kv_shared_layers": 0}),
    "gemma4-shared": ("Gemma4Text", {**GEMMA4, **OF_LAYERS, "num_kv_shared_layers": 2}),
    "glm4-moe": ("Glm4Moe", {"head_dim": 8, **ROUTED}),
    "gpt-j": ("GPTJ", SMALL),
    "gpt-oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("Granite", {}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            **MAMBA,
        },
    ),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "helium": ("Helium", {"head_dim": 8}),
    "hrm": ("HrmText", {}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8}),
    "jamba": (
        "Jamba",
        {
            "num_experts": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "use_mamba_kernels": False,
        },
    ),
    "kimi-linear": ("KimiLinear", {}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "minimax": ("MiniMax", {"layer_types": MIXED, "num_local_experts": 2, "head_dim": 8}),
    "ministral3": ("Ministral3", {"head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "modernbert-decoder": ("ModernBertDecoder", {}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 4}),
    "nanochat": ("NanoChat", {}),
    "nemotron": ("Nemotron", {}),
    "olmo-hybrid": ("OlmoHybrid", {"layer_types": MIXED}),
    "olmo3": ("Olmo3", {"layer_types": SLIDING}),
    "persimmon": ("Persimmon", {}),
    "phi3.5-moe": ("Phimoe", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3-next": (
        "Qwen3Next",
        {**LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "recurrent-gemma": (
        "RecurrentGemma",
        {"lru_width": 32, "head_dim": 8, "block_types": ["recurrent", "attention"]},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 8}),
    "vaultgemma": ("VaultGemma", {"head_dim": 8}),
    "xglm": ("XGLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4}),
    "zamba2": (
        "Zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
}


def targets_of(made: Any) -> tuple[str, ...]:
    """Return the layers to adapt of the model with the configuration `made`."""
    import transformers

    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(made)
    linear = {
        name.rpartition(".")[2]
        for name, layer in whole.named_modules()
        if isinstance(layer, nn.Linear) and "expert" not in name
    }
    return tuple(one for one in TARGETS if one in linear)[:3]


def found(small: Path, folder: Path, kind: str) -> Iterator[str]:
    """Yield what becomes of a kind, for each cut."""
    name, sizes = KINDS[kind]
    for ends in ENDS:
        torch.manual_seed(0)
        place = folder / f"{kind}-{len(ends)}"
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                made = cutting.config(name, **{"pad_token_id": 0, **sizes})
                targets = targets_of(made)
                lora = Lora(rank=2, targets=targets, dropout=0.0 if "n_group" in sizes else 0.2)
                prepared = cutting.prepared_of(small, place, made, targets, lora=lora)
                cutting.require_same_bits(prepared, *ends)
            yield "same bits"
        except UsageError as error:
            yield f"refused: {error}"
        except AssertionError as error:
            yield f"WRONG: {error}"
        except Exception as error:  # noqa: BLE001  (whatever a model of others raises)
            yield f"CRASHED: {type(error).__name__}: {error}"


def main() -> None:
    """Try the kinds that the command line names, or all."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        small = Path(name, "small")
        with contextlib.redirect_stdout(io.StringIO()):
            make_small.make(small)
        same = 0
        for kind in sys.argv[1:] or KINDS:
            told = [*found(small, Path(name), kind)]
            same += told == ["same bits"] * len(ENDS)
            print(f"{kind}: {' | '.join(dict.fromkeys(told))}"[:300], flush=True)
        print(f"{same} have the same bits in {' and '.join(str(len(e)) for e in ENDS)} stages")


if __name__ == "__main__":
    main()
