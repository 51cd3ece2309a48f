"""`generate()` of a transformers model after `moe_ops.compile`: its decode steps go through our backend."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import moe_ops

transformers = pytest.importorskip("transformers", minversion="5.17")
from transformers import CompileConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402


def tiny() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=50,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def compile_quietly(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return moe_ops.compile(model, **options)


TOKENS = torch.randint(1, 50, (1, 5), generator=torch.Generator().manual_seed(0))


def test_decode_steps_go_through_the_backend() -> None:
    torch.compiler.reset()
    model = tiny()
    arguments = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    wanted = model.generate(TOKENS, **arguments)
    compiled = compile_quietly(model, backend="moe_ops_eager")
    # transformers compiles decode steps on GPUs alone, but for this setting of its own tests.
    model.generation_config.compile_config._compile_all_devices = True
    counters.clear()
    got = compiled.generate(TOKENS, **arguments)
    assert counters["moe_ops"]["fused"] == 2, "the two layers of the decode step"
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(got, wanted)


def test_it_still_returns_what_torch_compile_returns() -> None:
    model = tiny()
    compiled = compile_quietly(model)
    assert type(compiled) is type(torch.compile(tiny()))
    assert compiled._orig_mod is model


def test_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    with caplog.at_level(logging.INFO, "compile_passes"), pytest.warns(UserWarning) as caught:
        moe_ops.compile(model)
        moe_ops.compile(model)
    said = [str(row.message) for row in caught if "generate" in str(row.message)]
    assert len(said) == 1
    assert 'generate(cache_implementation="static") of Qwen3MoeForCausalLM compiles its decode steps' in said[0]
    assert said == [record.message for record in caplog.records if "generate" in record.message]
    assert [row.filename for row in caught if "generate" in str(row.message)] == [__file__]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {"mode": "reduce-overhead", "options": None, "fullgraph": False, "dynamic": None}),
        ({"mode": "default"}, {"mode": None, "options": None}),
        ({"mode": "reduce-overhead"}, {"mode": None, "options": {"triton.cudagraphs": True}}),
        ({"options": {"max_autotune": True}}, {"mode": None, "options": {"max_autotune": True}}),
        ({"fullgraph": True, "dynamic": False}, {"fullgraph": True, "dynamic": False}),
        ({"backend": "moe_ops_eager"}, {"backend": "moe_ops_eager"}),
    ],
    ids=lambda value: "-".join(value) or "nothing" if isinstance(value, dict) else None,
)
def test_what_was_asked_of_compile_is_asked_of_generate(options: dict[str, Any], wanted: dict[str, Any]) -> None:
    model = tiny()
    compile_quietly(model, **options)
    held = model.generation_config.compile_config.to_dict()
    assert {"backend": "moe_ops", **wanted} == {name: held[name] for name in {"backend": "", **wanted}}


def test_a_later_call_replaces_what_was_set() -> None:
    model = tiny()
    compile_quietly(model)
    compile_quietly(model, backend="moe_ops_eager")
    assert model.generation_config.compile_config.backend == "moe_ops_eager"


def test_the_configuration_of_another_backend_is_kept() -> None:
    model = tiny()
    own = model.generation_config.compile_config = CompileConfig(backend="inductor")
    with pytest.warns(UserWarning, match="keeps its compile_config, which asks for the backend 'inductor'"):
        moe_ops.compile(model)
    assert model.generation_config.compile_config is own


def test_options_that_are_no_json_are_not_set() -> None:
    model = tiny()
    with pytest.warns(UserWarning, match="could no longer be written as JSON"):
        moe_ops.compile(model, options={"post_grad_custom_pre_pass": lambda graph: None})
    assert model.generation_config.compile_config is None


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_other_backends_set_nothing(backend: str) -> None:
    model = tiny()
    compile_quietly(model, backend=backend)
    assert model.generation_config.compile_config is None


def test_modules_that_do_not_generate_are_left_alone() -> None:
    layer = torch.nn.Linear(2, 2)
    assert compile_quietly(layer)._orig_mod is layer
    assert "generation_config" not in vars(layer)


def test_the_model_is_still_copied_and_saved(tmp_path: Path) -> None:
    model = tiny()
    compile_quietly(model, mode="reduce-overhead")
    twin = copy.deepcopy(model)
    assert twin.generation_config.compile_config == model.generation_config.compile_config
    assert twin.generation_config.compile_config is not model.generation_config.compile_config
    model.save_pretrained(tmp_path)
    assert "compile_config" not in json.loads((tmp_path / "generation_config.json").read_text())
    assert json.loads(model.generation_config.to_json_string())["compile_config"]["backend"] == "moe_ops"
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.compile_config is None
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, twin(TOKENS).logits)


@pytest.mark.parametrize("name", ["restore", "stack_experts_", "explain"])
@pytest.mark.parametrize("model", [None, 3], ids=["none", "number"])
def test_what_is_no_model_is_refused(name: str, model: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: model must be a "):
        getattr(moe_ops, name)(model)


@pytest.mark.parametrize("model", [None, 3, [torch.nn.Linear(2, 2)]], ids=["none", "number", "list"])
def test_what_cannot_be_called_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="compile: model must be a module or a function, got "):
        moe_ops.compile(model)
