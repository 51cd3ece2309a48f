"""What `moe_ops.compile` lets Dynamo capture is captured of that model alone: settings hold while it is compiled."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.utils import counters

import moe_ops
from benchmarks import sorted_block
from benchmarks.foreign import GraniteMoe
from benchmarks.loops import H, MoeInfer
from benchmarks.sorted_block import CountedMoE
from compile_passes.compat import NUMBERS, SIZES, capturing
from moe_ops import testing
from moe_ops.compat import captured_under, names_in

BLOCKS = {
    "loop": MoeInfer,
    "cut_by_counts": partial(GraniteMoe, dim=H, hidden=H, dtype=torch.float32),
    "bincount": CountedMoE,
}
SETTINGS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    """Whatever a test does to models, the settings are those of before."""
    torch.compiler.reset()
    before = settings()
    yield
    assert settings() == before


def settings() -> tuple[bool, bool]:
    return getattr(config, SIZES), getattr(config, NUMBERS)


def block(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(BLOCKS[name]()).eval()


def tokens(model: nn.Module, count: int) -> Tensor:
    counted = any(isinstance(module, CountedMoE) for module in model.modules())
    x = torch.randn(2, count, sorted_block.H if counted else H, generator=torch.Generator().manual_seed(count))
    return x.to(next(model.parameters()).dtype)


def compiled(model: Any, **options: Any) -> Any:
    """What `moe_ops.compile` makes of a model, with the counters at zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = moe_ops.compile(model, **{"backend": "moe_ops_eager", **options})
    counters.clear()
    return function


def counted() -> tuple[int, int, int]:
    """Graphs, graph breaks, and frames that Dynamo compiled or tried to."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["total"]


class Reads:
    """A backend that leaves graphs as they are, and writes down the settings that they are compiled under."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.seen.append(settings())
        return gm.forward


def asks_for_numbers(x: Tensor) -> Tensor:
    return x * (x > 0).sum().item()


def asks_for_sizes(x: Tensor) -> Tensor:
    return x[(x > 1).nonzero()[:, 0]].sum(0)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("plain", [asks_for_numbers, asks_for_sizes], ids=lambda plain: plain.__name__)
def test_other_models_are_compiled_as_before(plain: FunctionType, name: str) -> None:
    def counts() -> list[tuple[int, int, int]]:
        torch.compiler.reset()
        counters.clear()
        function = torch.compile(plain, backend="eager")
        found = []
        for count in (2, 7, 64):
            x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
            torch.testing.assert_close(function(x), plain(x))
            found.append(counted())
        return found

    before, model = counts(), block(name)
    assert before[-1][1] > 0
    with torch.no_grad():
        compiled(model)(tokens(model, 3))
    assert counts() == before


# Each block asks for other settings, and torch finds what varies in each way; a loop is asked in all of them.
@pytest.mark.parametrize(
    ("name", "options"),
    [("loop", {}), ("loop", {"dynamic": True}), ("loop", {"dynamic": False}), ("cut_by_counts", {"dynamic": True}),
     ("bincount", {})],
    ids=["loop-found", "loop-dynamic", "loop-static", "cut_by_counts-dynamic", "bincount-found"],
)  # fmt: skip
def test_one_graph_without_a_break(name: str, options: dict[str, Any]) -> None:
    """When it is compiled again for other sizes, too, and never for one that it has code for."""
    model = block(name)
    function, graphs = compiled(model, **options), []
    with torch.no_grad():
        for count in (2, 7, 64, 7, 2):
            x = tokens(model, count)
            torch.testing.assert_close(function(x), model(x), atol=2e-2, rtol=2e-2)
            graphs.append(counted())
    numbers = [1, 2, 3, 3, 3] if "dynamic" in options and not options["dynamic"] else [1, 2, 2, 2, 2]
    assert graphs == [(number, 0, number) for number in numbers]
    assert counters["moe_ops"]["fused"] == numbers[-1]


def test_the_rest_behind_a_break_and_frames_of_their_own() -> None:
    """Resumed functions, and those that Python calls, are captured as the model is."""
    model, reads = nn.Sequential(Breaks(), Alone(block("loop"))), Reads()
    function = compiled(model.eval(), backend=reads)
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(model, 5)), model(tokens(model, 5)), atol=1e-5, rtol=1e-5)
    assert reads.seen and set(reads.seen) == {(True, False)}
    assert counters["graph_break"] and all("graph_break" in reason for reason in counters["graph_break"])


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


class Alone(nn.Module):
    """Runs a module in a frame of its own, from one that is left to Python."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("own", SETTINGS, ids=lambda own: "-".join(map(str, own)))
def test_settings_of_the_user_are_kept(own: tuple[bool, bool]) -> None:
    model, reads = block("loop"), Reads()
    with config.patch(dict(zip((SIZES, NUMBERS), own, strict=True))), torch.no_grad():
        function = compiled(model, backend=reads)
        assert settings() == own
        function(tokens(model, 3))
        assert settings() == own
    assert reads.seen == [(True, own[1])]


@pytest.mark.parametrize("own", SETTINGS[1:3], ids=lambda own: "-".join(map(str, own)))
def test_an_exception_restores_them(own: tuple[bool, bool]) -> None:
    """After both tries; the next call is compiled as if nothing had been."""
    model, reads, fails = block("loop"), Reads(), [True]

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        function = reads(gm, inputs)
        if fails:
            raise ZeroDivisionError
        return function

    with config.patch(dict(zip((SIZES, NUMBERS), own, strict=True))), torch.no_grad():
        function = compiled(model, backend=backend)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            function(tokens(model, 3))
        assert settings() == own
        assert reads.seen[0] == (True, own[1]) and reads.seen[-1] == (False, False)
        reads.seen.clear()
        fails.clear()
        function(tokens(model, 3))
        assert settings() == own and reads.seen == [(True, own[1])]


def test_threads_that_compile_at_once() -> None:
    """None sees what another one captures, and a model is captured so by whatever thread calls it first."""
    ready, problems = threading.Barrier(2), []
    models = [block("loop") for _ in range(3)]
    others = [FunctionType(asks_for_sizes.__code__.replace(co_name=f"of_{turn}"), globals()) for turn in range(3)]
    reads, plain = Reads(), Reads()
    functions = [compiled(model, backend=reads, dynamic=True) for model in models]

    def run(calls: list[Callable[[], Any]]) -> None:
        try:
            for call in calls:
                ready.wait(60)
                with torch.no_grad():
                    call()
        except Exception as error:
            problems.append(error)
            ready.abort()

    ours = [partial(function, tokens(model, 3)) for function, model in zip(functions, models, strict=True)]
    theirs = [partial(torch.compile(other, backend=plain), tokens(models[0], 3)[0]) for other in others]
    threads = [threading.Thread(target=run, args=[calls]) for calls in (ours, theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert reads.seen == [(True, False)] * len(models)  # a graph each
    assert plain.seen and set(plain.seen) == {(False, False)}


def test_in_data_parallel() -> None:
    """Dynamo compiles frames there by a copy of what it compiles others by."""
    model, reads = block("loop"), Reads()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(compiled(model, backend=reads))(tokens(model, 5))
    finally:
        torch.distributed.destroy_process_group()
    assert reads.seen and set(reads.seen) == {(True, False)}


def test_a_model_is_prepared_once() -> None:
    """What says how it is captured stays with the modules: for a second call, one around or inside, and for copies."""
    model = block("loop")
    compiled(model)
    for other in (model, nn.Sequential(model), model[0], copy.deepcopy(model)):
        torch.compiler.reset()
        function = compiled(other)
        with torch.no_grad():
            function(tokens(model, 3))
        assert counted() == (1, 0, 1) and counters["moe_ops"]["fused"] == 1
        assert moe_ops.explain(other, tokens(model, 3)).graph_break_reasons == []


def test_restore_forgets_it() -> None:
    model = block("cut_by_counts")
    compiled(model)
    assert captured_under(model) == {SIZES: True, NUMBERS: True}
    assert captured_under(moe_ops.restore(model)) == {}


@pytest.mark.parametrize("given", ["model", "compiled", "method", "function", "function_of_it"])
def test_the_kit_captures_it(given: str) -> None:
    model = block("loop")
    function = compiled(model)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "model": model, "compiled": function, "method": model.forward,
        "function": lambda x: model(x) * 2, "function_of_it": lambda x: function(x) * 2,
    }  # fmt: skip
    testing.assert_no_graph_breaks(ways[given], tokens(model, 3), backend="moe_ops_eager")
    testing.assert_fused(ways[given], tokens(model, 3), blocks=1)


def test_a_function_without_values_is_one_of_no_model() -> None:
    def function() -> Any:
        return later

    assert captured_under(function) == {}
    later = None
    assert captured_under(function) == {}


def test_what_is_compiled_again_has_two_tries_no_more() -> None:
    function = torch.compile(asks_for_sizes, backend="eager")
    for name in (SIZES, NUMBERS):
        capturing(function, {name: True}, fullgraph=False)
    convert = names_in(function)["callback"]._torchdynamo_orig_backend
    assert type(convert.convert) is not type(convert)


@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])
def test_where_torch_compiles_frames_in_another_way(fullgraph: bool) -> None:
    """The settings are the process's then; with ``fullgraph`` torch has them by itself."""

    def function() -> None: ...

    with config.patch({SIZES: False, NUMBERS: False}):
        capturing(function, {SIZES: True}, fullgraph=fullgraph)  # nothing that torch.compile made
        assert settings() == (False, False)
        function._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
        assert capturing(function, {SIZES: True}, fullgraph=fullgraph) is function
        assert settings() == (not fullgraph, False)


def generating() -> Any:
    """A tiny transformers model with a loop over the experts that were hit in the place of its blocks."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=H, intermediate_size=32, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=50,
        eos_token_id=None, pad_token_id=0, mlp_only_layers=[0, 1],
    ))  # fmt: skip
    for layer in model.model.layers:
        layer.mlp = MoeInfer()
    return model.eval()


GENERATE = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
PROMPT = torch.randint(1, 50, (1, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("settings_of_it", ["default", "fullgraph"])
def test_generate_compiles_its_steps_so(settings_of_it: str) -> None:
    model = generating()
    wanted = model.generate(PROMPT, **GENERATE)
    function = compiled(model, **({"fullgraph": True} if settings_of_it == "fullgraph" else {}))
    model.generation_config.compile_config._compile_all_devices = True  # they are compiled on GPUs alone
    for _ in range(2):  # it keeps what it compiled
        assert torch.equal(function.generate(PROMPT, **GENERATE), wanted)
        assert counters["moe_ops"]["fused"] == 2, "the two layers of the decode step"
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_generate_of_another_backend_is_as_before() -> None:
    model = generating()
    compiled(model)
    own, reads = copy.deepcopy(model.generation_config.compile_config), Reads()
    own.backend, own._compile_all_devices, own.mode = lambda *graph: reads(*graph), True, None  # no copy is made of it
    model.generation_config.compile_config = own
    model.generate(PROMPT, **GENERATE)
    assert reads.seen and set(reads.seen) == {(False, False)}


def test_models_that_generate_are_copied_and_restored() -> None:
    model = generating()
    compiled(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.get_compiled_call.__self__ is twin
    assert "get_compiled_call" not in vars(moe_ops.restore(model))
