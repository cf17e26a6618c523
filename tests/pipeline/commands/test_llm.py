"""The front door: `from scalegate import LLM` in a few lines, and the rest at the top level, lazily."""

import inspect
import pickle
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import scalegate
from scalegate import LLM, EngineOptions, SamplingParams, UserError
from scalegate.pipeline.model_loader import load_model
from scalegate.pipeline.model_loader.served_checkpoint import build_engine
from transformers import AutoConfig, AutoModelForCausalLM

EXAMPLE = Path(__file__).parents[3] / "examples" / "generate.py"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = ["def read_lines(path):", "import os\n\nclass "]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}# {{ message.role }}: {{ message.content }}\n{% endfor %}# assistant: "
)


@pytest.fixture(scope="module")
def llm(example_checkpoint: Path):
    with LLM(example_checkpoint, device="cpu", dtype="float32", max_num_seqs=4, max_model_len=256) as llm:
        yield llm


def test_texts_are_those_of_the_engine_behind_the_server(llm: LLM, example_checkpoint: Path):
    options = EngineOptions(device="cpu", dtype="float32", max_num_seqs=4, max_model_len=256)
    expected = build_engine(example_checkpoint, options).generate(
        [llm.tokenizer.encode(prompt) for prompt in PROMPTS], GREEDY
    )
    results = llm.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == [answer.token_ids for answer in expected]
    for result in results:
        assert result.text == llm.tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
        assert (len(result.token_ids), result.finish_reason, result.logprobs) == (12, "length", ())
    assert results[0].text != results[1].text


def test_prompts_may_be_tokens_and_may_come_alone(llm: LLM):
    tokens = llm.tokenizer.encode(PROMPTS[0])
    [by_text], [by_tokens], [alone] = (
        llm.generate(prompt, GREEDY) for prompt in (PROMPTS[0], tokens, [tokens])
    )
    assert by_text == by_tokens == alone and by_text.prompt_token_ids == tuple(tokens)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (
            {"model_type": "rwkv", "context_length": 256},
            {},
            "cannot serve RwkvForCausalLM: it keeps a recurrent",
        ),
        (
            {"model_type": "bloom", "n_layer": 1, "n_head": 2},
            {"kv_cache_dtype": "fp8"},
            "which fp8 would round (--kv-cache-dtype unquantized keeps them)",
        ),
        (
            {"model_type": "gpt2", "n_layer": 1, "n_head": 2},
            {"max_model_len": 4096},
            "max_model_len=4096 is more than",
        ),
    ],
)
def test_what_cannot_be_served_is_said_before_weights_are_read(
    config: dict, options: dict, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes | config))
    model.save_pretrained(tmp_path / "model")

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(load_model, "load_model", read)
    with pytest.raises(UserError, match=re.escape(said)):
        LLM(tmp_path / "model", device="cpu", max_num_seqs=1, **options)


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM):
    each = [SamplingParams(max_tokens=3, temperature=0, logprobs=2), GREEDY]
    first, second = llm.generate(PROMPTS, each)
    assert (len(first.token_ids), len(second.token_ids)) == (3, 12)
    assert len(first.logprobs) == 3 and len(first.logprobs[0].top) == 2 and second.logprobs == ()
    with pytest.raises(UserError, match="2 prompts have 1 sampling parameters"):
        llm.generate(PROMPTS, [GREEDY])


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM):
    with pytest.raises(UserError, match="may have at most 255"):
        llm.generate([PROMPTS[0], [1] * 300], GREEDY)
    assert len(llm.generate(PROMPTS, GREEDY)) == 2


def test_chat_goes_through_the_checkpoints_template(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    question = {"role": "user", "content": "hello"}
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="no chat template"):
        llm.chat([question], GREEDY)
    monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATE)
    [answer] = llm.chat([question], GREEDY)
    [same] = llm.generate("# user: hello\n# assistant: ", GREEDY)
    assert answer.token_ids == same.token_ids
    assert [completion.token_ids for completion in llm.chat([[question], [question]], GREEDY)] == [
        answer.token_ids
    ] * 2
    with pytest.raises(UserError, match="no tools here"):
        llm.chat([{"role": "tool", "content": "x"}], GREEDY)


def test_without_parameters_the_checkpoints_defaults_are_taken(llm: LLM):
    assert llm.default_params.max_tokens == 16
    assert len(llm.generate(PROMPTS[0])[0].token_ids) <= 16


def test_a_closed_one_says_so(example_checkpoint: Path):
    llm = LLM(example_checkpoint, device="cpu", max_num_seqs=1, max_model_len=64)
    llm.close()
    llm.close()
    with pytest.raises(UserError, match="closed"):
        llm.generate("x")


def test_its_options_are_the_engines(example_checkpoint: Path):
    assert {field.name for field in fields(EngineOptions)} < set(inspect.signature(LLM).parameters)
    with pytest.raises(UserError, match="did you mean max_num_seqs"):
        LLM(example_checkpoint, max_nun_seqs=4)
    with pytest.raises(UserError, match="unknown kv_cache_dtype 'int3'"):
        LLM(example_checkpoint, kv_cache_dtype="int3")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    output = capsys.readouterr().out
    assert '"""' in output and len(output.splitlines()) > 2


def test_importing_the_package_imports_nothing_heavy():
    program = "import sys, scalegate; dir(scalegate); print('torch' in sys.modules, 'click' in sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.stdout == "False False\n"


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        (
            "pipeline.commands.push pipeline.commands.verify pipeline.commands.inspect",
            "transformers torchao torch._inductor matplotlib",
        ),
        ("pipeline.cli.serve pipeline.commands.serve", "torch transformers"),
        (
            "pipeline.model_loader.served_checkpoint serving_check.server.engine_child",
            "fastapi uvicorn pydantic torch",
        ),
    ],
    ids=["publishing and verifying", "answering HTTP", "the engine's process, of HTTP"],
)
def test_what_is_not_needed_is_not_imported(imported, absent):
    program = "".join(f"import scalegate.{name}\n" for name in imported.split())
    program += f"import sys; print(set('{absent}'.split()) & set(sys.modules))"
    assert answer_of(program) == "set()\n"


def test_a_tokenizer_that_was_sent_to_another_process_needs_no_torch(llm: LLM, tmp_path: Path):
    sent = tmp_path / "tokenizer"
    sent.write_bytes(pickle.dumps(llm.tokenizer))
    program = f"import pickle, sys; tokenizer = pickle.load(open({str(sent)!r}, 'rb'))\n"
    program += f"print(tokenizer.encode({PROMPTS[0]!r}), 'torch' in sys.modules)"
    assert answer_of(program) == f"{llm.tokenizer.encode(PROMPTS[0])} False\n"


def answer_of(program: str) -> str:
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_top_level_names_are_the_functions_themselves():
    from scalegate.pipeline.commands.push import push
    from scalegate.pipeline.commands.validate import validate

    assert scalegate.push is push and scalegate.validate is validate
    for name in scalegate.__all__:
        assert getattr(scalegate, name) is not None and name in dir(scalegate)
    assert scalegate.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = scalegate.quantise
