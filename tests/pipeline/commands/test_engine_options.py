"""An engine's option is said once, and is then on every command line, in every signature and record."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest
import scalegate
from click.testing import CliRunner
from scalegate import EngineOptions, UserError
from scalegate.base.option_fields import flag, from_given, words_of
from scalegate.pipeline.cli import release, serve, validate
from scalegate.pipeline.validation.servers import effective_options

COMMANDS = {"serve": serve.command, "validate": validate.command, "release": release.command}
OPTIONS = fields(EngineOptions)
ANOTHER = {
    "device": "cpu",
    "dtype": "float32",
    "layout": "dequantize",
    "batch_invariance": "pin",
    "max_num_seqs": 3,
    "max_model_len": 64,
    "kv_cache_dtype": "fp8",
    "page_size": 32,
    "kv_cache_tokens": 640,
    "prefill_chunk": 48,
    "chunk_while_decoding": 24,
    "decode_buckets": (1, 2, 3),
    "compiled": False,
    "overlapped": False,
    "jit_monitor": "error",
}


def test_the_cases_below_are_of_every_option_and_differ_from_its_default():
    assert list(ANOTHER) == [option.name for option in OPTIONS]
    assert all(ANOTHER[option.name] != option.default for option in OPTIONS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_line_takes_every_option_and_says_what_it_may_be(command: str):
    wide = {"terminal_width": 400, "max_content_width": 400}
    text = " ".join(CliRunner().invoke(COMMANDS[command], ["--help"], **wide).output.split())
    for option in OPTIONS:
        assert f" {flag(option.name)} " in text
        assert option.metadata["help"].partition("; by default")[0].rstrip(".") in text
        if option.metadata["choices"] is not None:
            assert f"[{'|'.join(option.metadata['choices']())}]" in text


@pytest.mark.parametrize("name", ["serve", "validate", "release", "LLM"])
def test_every_signature_names_every_option(name: str):
    parameters = inspect.signature(getattr(scalegate, name)).parameters
    assert {option.name for option in OPTIONS} <= set(parameters)
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_words_of_a_command_line_give_the_same_options():
    for options in (EngineOptions(), EngineOptions(**ANOTHER)):
        context = serve.command.make_context("serve", ["model", *words_of(options.to_json())])
        given = {option.name: context.params[option.name] for option in OPTIONS}
        assert from_given(EngineOptions, given) == options


def test_what_is_not_given_stays_open():
    context = validate.command.make_context("validate", ["model"])
    assert {context.params[option.name] for option in OPTIONS} == {None}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_num_seqs", 0, "max_num_seqs is 0; it must be a whole number, at least 1"),
        ("max_num_seqs", "many", "must be a whole number"),
        ("max_num_seqs", True, "must be a whole number"),
        ("decode_buckets", (4, 2), "distinct whole numbers, ascending"),
        ("decode_buckets", (0, 2), "at least 1"),
        ("compiled", "no", "true or false"),
        ("dtype", "int3", "unknown dtype 'int3'; choose one of: auto, bfloat16, float16, float32"),
        ("layout", "upside_down", "unknown layout 'upside_down'; choose one of: .*dequantize"),
        ("kv_cache_dtype", "int3", "unknown kv_cache_dtype 'int3'; choose one of: auto, unquantized, fp8"),
        ("jit_monitor", "shout", "choose one of: off, warn, error"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_python_and_on_the_command_line(name, value, message):
    with pytest.raises(UserError, match=message):
        EngineOptions(**{name: value})
    if isinstance(value, bool) or name == "compiled":
        return
    words = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    result = CliRunner().invoke(serve.command, ["model", flag(name), words])
    assert result.exit_code == 2 and flag(name) in result.output


def test_an_unknown_name_is_refused_with_one_that_is_like_it(tmp_path):
    with pytest.raises(UserError, match="no option 'kv_cache_dtyp'; did you mean kv_cache_dtype"):
        scalegate.validate(tmp_path, kv_cache_dtyp="fp8")
    with pytest.raises(UserError, match="did you mean create_pr"):
        scalegate.release(tmp_path, "int4-hqq", "org/name", creat_pr=True)


def test_the_record_spells_out_what_the_engine_would_have_chosen():
    recorded = effective_options(EngineOptions(device="cpu"))
    assert list(recorded) == [option.name for option in OPTIONS]
    assert (recorded["prefill_chunk"], recorded["chunk_while_decoding"]) == (2048, 512)
    assert effective_options(EngineOptions(device="cuda"))["chunk_while_decoding"] == 256
    assert effective_options(EngineOptions(device="cpu", prefill_chunk=64))["chunk_while_decoding"] == 64


def test_help_of_the_whole_command_imports_no_torch():
    program = (
        "import sys; from scalegate.pipeline.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    for words in (["--help"], ["serve", "model", "--max-num-seqs", "0"]):
        run = subprocess.run([sys.executable, "-P", "-c", program, *words], capture_output=True, text=True)
        assert run.stdout.splitlines()[-1] == "False"
