"""Models by name: what a name stands for, told offline, and one sentence for every name that stands for nothing."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import moe_ops
from compile_passes import named
from compile_passes.named import is_named, subject
from compile_passes.tiny import model_of
from tests.passes.blocks import batched, block, weights

FAMILIES = {
    "mistralai/Mixtral-8x7B-v0.1": "mixtral",
    "Qwen/Qwen3-30B-A3B": "qwen3_moe",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_moe",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek_v3",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek_v32",
    "openai/gpt-oss-20b": "gpt_oss",
    "unsloth/gpt-oss-20b-bnb-4bit": "gpt_oss",
    "allenai/OLMoE-1B-7B-0924": "olmoe",
    "microsoft/Phi-3.5-MoE-instruct": "phimoe",
    "ibm-granite/granite-3.0-1b-a400m-base": "granitemoe",
    "ai21labs/AI21-Jamba-1.5-Mini": "jamba",
    "mistralai/Mistral-7B-v0.1": "mistral",
    "databricks/dbrx-base": "dbrx",
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """No model on the hub was ever downloaded here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_by_name(name):
    family = FAMILIES[name]
    if family not in named._families():
        pytest.skip(f"transformers has no {family}")
    assert named._configuration_of(name) == (family, None)


UNKNOWN = {
    "Mixtrall": ["near it: mixtral", "config.json", "package.module:factory"],
    "org/completely-different": ["must be the name of a model of a known family", "Give a transformers model type"],
    "Qwen/Qwen3-8B": ["may be any of qwen3, qwen3_moe", "config.json names"],
    "zai-org/GLM-4.5-Air": ["may be any of glm4, glm4_moe"],
    "Qwen/Qwen1.5-MoE-A2.7B": ["near it: ", "qwen2_moe"],
    "llama-8x7b": ["must be the name of a model of a known family"],
    "": ["must be the name of a model of a known family"],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_does_not_decide(name):
    with pytest.raises(ValueError) as caught:
        named._guess(name)
    assert all(words in str(caught.value) for words in UNKNOWN[name]), caught.value
    assert len(str(caught.value).splitlines()) == 1


def test_the_cache_knows_more_than_the_name(tmp_path):
    """deepseek-ai/DeepSeek-R1 is a deepseek_v3, which its name does not say."""
    folder = tmp_path / "hub" / "models--deepseek-ai--DeepSeek-R1"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_text('{"model_type": "deepseek_v3", "n_group": 8}')
    family, values = named._configuration_of("deepseek-ai/DeepSeek-R1")
    assert (family, values["n_group"]) == ("deepseek_v3", 8)


def test_the_hub_is_not_asked(monkeypatch):
    def connect(*args, **kwargs):
        raise AssertionError("a connection")

    monkeypatch.setattr("socket.socket.connect", connect)
    assert named._configuration_of("mistralai/Mixtral-8x7B-v0.1") == ("mixtral", None)


def _classes():
    from transformers import MixtralConfig, Qwen3MoeConfig

    return {"class": MixtralConfig, "object": Qwen3MoeConfig(norm_topk_prob=True, hidden_size=4096)}


@pytest.mark.parametrize("kind", ["class", "object"])
def test_configurations(kind):
    config = _classes()[kind]
    assert is_named(config)
    model, args, kwargs = subject(config, tokens=5, dtype=torch.float32)
    assert type(model).__name__ == {"class": "MixtralForCausalLM", "object": "Qwen3MoeForCausalLM"}[kind]
    assert args == () and kwargs["input_ids"].shape == (1, 5) and model.dtype == torch.float32
    assert model.config.hidden_size == 64
    if kind == "object":
        assert model.config.norm_topk_prob is True, "what is no size is the configuration's"


def test_choices_of_a_config_file_are_kept(tmp_path):
    values = {"model_type": "qwen3_moe", "norm_topk_prob": True, "hidden_act": "gelu", "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, _ = model_of(*named._configuration_of(str(tmp_path)))
    assert (config.norm_topk_prob, config.hidden_act, config.vocab_size) == (True, "gelu", 128)


def test_a_model_is_no_name():
    assert not is_named(torch.nn.Linear(2, 2)) and not is_named(block(batched)) and not is_named(torch.nn.Linear)


def factory():
    """Keyword arguments by default."""
    return block(batched), weights()


def with_gradients():
    """A model as it is made: all of its parameters require grad."""
    from moe_ops.examples.broken import Sound, tokens

    return Sound(), tokens()


def test_a_model_by_name_is_run_without_gradients():
    (row,) = moe_ops.explain(f"{__name__}:with_gradients").fused
    assert row.to_dict()["operators"] == ["fused_moe"]


def with_one_tensor():
    return torch.relu, torch.ones(3)


def with_a_tuple():
    return torch.add, (torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("name", ["factory", "with_one_tensor", "with_a_tuple"])
def test_factories(name):
    report = moe_ops.explain(f"{__name__}:{name}")
    assert report.error is None and report.graphs == 1
    assert len(report.fused) == (name == "factory")


def test_python_and_command_line_say_the_same(capsys):
    from compile_passes.__main__ import main

    assert main(["explain", "mistralai/Mixtral-8x7B-v0.1", "--tokens", "8", "--experts", "batched_mm"]) == 0
    report = moe_ops.explain("mistralai/Mixtral-8x7B-v0.1", tokens=8, experts="batched_mm")
    assert capsys.readouterr().out.strip() == str(report)
    assert [row.experts for row in report.fused] == ["batched_mm", "batched_mm"]


def test_a_factory_beside_the_user_is_found_by_the_script(tmp_path, monkeypatch, capsys):
    """`moe-ops`, unlike `python -m`, has no current folder on its path."""
    from compile_passes.__main__ import main

    (tmp_path / "beside_the_user.py").write_text("import torch\ndef made():\n    return torch.relu, torch.ones(3)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert main(["explain", "beside_the_user:made"]) == 0
    assert "No MoE block is in a captured graph" in capsys.readouterr().out and sys.path == before


BAD = {
    "inputs": (("mixtral", torch.zeros(1)), {}, "must come without inputs"),
    "keyword": (("mixtral",), {"input_ids": torch.zeros(1)}, "must be given experts, dtype or tokens, got input_ids"),
    "experts": (("mixtral",), {"experts": "triton"}, "must be one of grouped_mm, batched_mm, eager, got 'triton'"),
    "tokens": (("mixtral",), {"tokens": 0}, "tokens must be at least 1, got 0"),
    "of a factory": ((f"{__name__}:factory",), {"tokens": 4}, "a factory takes no tokens"),
    "empty module": ((":factory",), {}, "must be module:factory"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name):
    args, kwargs, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        moe_ops.explain(*args, **kwargs)


@pytest.mark.parametrize("text", ["not json", "[]", "{}"])
def test_a_file_that_is_no_configuration(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"must be the config\.json of a transformers model"):
        subject(str(tmp_path))


def test_a_configuration_of_somebody_else():
    from transformers import MixtralConfig

    class Mine(MixtralConfig):
        """Not one that transformers ships."""

    with pytest.raises(ValueError, match=r"Mine must be a configuration that transformers ships\. Give"):
        subject(Mine())


def test_without_transformers(monkeypatch):
    named._families.cache_clear()
    monkeypatch.setattr(named.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs transformers, got none"):
        named._configuration_of("mixtral")
    named._families.cache_clear()


def test_transformers_is_not_imported_to_look_at_a_model(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.configuration_utils", raising=False)
    assert not is_named(torch.relu)
    assert "transformers.configuration_utils" not in sys.modules
