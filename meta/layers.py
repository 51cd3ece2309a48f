"""MoE layers of published models: what is tuned and measured by default."""

from __future__ import annotations

#: Name -> (E, K, H, I) of one layer, from the models' configurations.
MODEL_LAYERS: dict[str, tuple[int, int, int, int]] = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "olmoe-1b-7b": (64, 8, 2048, 1024),
    "deepseek-v3": (256, 8, 7168, 2048),
}
